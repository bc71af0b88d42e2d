//! Templates of well-known formats by name, for checkpoints that bring none (`--chat-template NAME`).
//!
//! They are never chosen by themselves: a model without a template is not guessed at.

use crate::{Error, Result};

/// ChatML: SmolLM, Qwen, Hermes and many others.
const CHATML: &str = "{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";

/// Llama 3.
const LLAMA3: &str = "{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}";

/// Gemma 2 and 3: no system turn, so it leads the first user turn.
const GEMMA: &str = "{{- bos_token -}}
{%- set ns = namespace(lead='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{- raise_exception('A system message must come first') -}}{%- endif -%}
{%- set ns.lead = message.content | trim + '\\n\\n' -%}
{%- else -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\\n' + ns.lead + message.content | trim + '<end_of_turn>\\n' -}}
{%- set ns.lead = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}";

/// Phi-3.
const PHI3: &str = "{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}";

/// Zephyr and TinyLlama chat.
const ZEPHYR: &str = "{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}";

/// Name and source of each.
pub const NAMED: &[(&str, &str)] = &[
    ("chatml", CHATML),
    ("gemma", GEMMA),
    ("llama3", LLAMA3),
    ("phi3", PHI3),
    ("zephyr", ZEPHYR),
];

/// The source of the template called `name`.
///
/// # Errors
/// [`Error::Template`] with the list of names.
pub fn find(name: &str) -> Result<&'static str> {
    NAMED
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, source)| *source)
        .ok_or_else(|| {
            let names: Vec<_> = NAMED.iter().map(|(known, _)| *known).collect();
            Error::Template(format!(
                "there is no template called `{name}`; there are {}, or give a file",
                names.join(", ")
            ))
        })
}

/// The error of a chat with a model that has no template.
pub fn missing() -> Error {
    let names: Vec<_> = NAMED.iter().map(|(known, _)| *known).collect();
    Error::Template(format!(
        "the model brings no chat template (`tokenizer.chat_template` is absent); it can complete text, but chat needs \
         `--chat-template` with a file or one of {}",
        names.join(", ")
    ))
}
