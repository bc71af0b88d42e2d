#!/usr/bin/env python3
"""Makes the small vocabularies and the expected token ids for crates/dynalm/tests/tokenizers.rs.

usage: vocabularies.py CORPUS.json OUT_DIR [MODEL.gguf ...]
       (needs: pip install tokenizers sentencepiece protobuf gguf)

References: Hugging Face `tokenizers` with the published splitting rules for byte-level BPE and for special tokens;
Google's `sentencepiece` for SentencePiece BPE. For each GGUF file given, its own vocabulary is put into the reference
library that fits, and OUT_DIR/real.json gets the ids under the SHA-256 of the vocabulary.
"""
import hashlib
import io
import json
import pathlib
import sys

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as pb
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@|"
)
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = LETTERS.replace("@", "") + r"\p{N}" + TAIL
GPT4O = LETTERS.replace("@", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"\p{N}{1,3}" + TAIL
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
SPLITS = {  # one name of each family
    "gpt-2": [GPT2],
    "llama-bpe": [LLAMA3],
    "dbrx": [LLAMA3],
    "qwen2": [QWEN2],
    "deepseek-r1-qwen": [QWEN2],
    "qwen35": [QWEN35],
    "smollm": [r"\p{N}", GPT2],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK_V3],
    "tekken": [TEKKEN],
    "gpt-4o": [GPT4O],
}
NFC = {"qwen2", "qwen35"}
IGNORE_MERGES = {"llama-bpe", "tekken"}
SPECIAL_CASES = [  # with control tokens recognised
    "<s>G", "</s> Hello", "<s>  two spaces", "a<s>b", "<s></s>", " <s> x", "Hello</s>", "<|im_start|>user\nhi<|im_end|>\n",
    "<mark>x", "a <mark> b", "  <mark>", "x<mark><mark>y", "<s", "<s>", "",
]
CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MARK = "<mark>"


def train_bpe(corpus):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(GPT2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900, min_frequency=2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(corpus * 3, trainer)
    state = json.loads(tok.to_str())["model"]
    merges = [" ".join(m) if isinstance(m, list) else m for m in state["merges"]]
    tokens = [t for t, _ in sorted(state["vocab"].items(), key=lambda item: item[1])]
    # Words that no merge makes: a vocabulary that ignores merges takes them whole.
    tokens += [t for t in ["Ġtokenizer", "Hello", "Ġ東京"] if t not in tokens]
    return tokens, merges


def byte_bpe(tokens, merges, controls, user_defined, pre_names=None, steps=None):
    """The reference for a byte-level vocabulary under one splitting rule."""
    vocab = {t: i for i, t in enumerate(tokens)}
    tok = Tokenizer(
        models.BPE(vocab, [tuple(m.split(" ")) for m in merges], ignore_merges=bool(set(pre_names or []) & IGNORE_MERGES))
    )
    if set(pre_names or []) & NFC:
        tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(s), "isolated") for s in steps]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_tokens([AddedToken(t, normalized=False) for t in user_defined])
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in controls])
    return tok


def plain(tok):
    """The same tokenizer without control tokens: what a user's text is encoded with."""
    state = json.loads(tok.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["special"]]
    return Tokenizer.from_str(json.dumps(state))


def train_spm(corpus, dummy_prefix):
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in corpus for line in text.split("\n") if line.strip()] * 3),
        model_writer=out, model_type="bpe", vocab_size=700, byte_fallback=True, character_coverage=0.98,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=dummy_prefix,
        user_defined_symbols=[MARK] if dummy_prefix else [MARK, "\n", "\n\n", "▁▁"], control_symbols=CONTROLS[2:], minloglevel=2,
        allow_whitespace_only_pieces=True, hard_vocab_limit=False,
    )
    return out.getvalue()


def proto_types(proto):
    p = pb.ModelProto.SentencePiece
    kinds = {p.NORMAL: NORMAL, p.UNKNOWN: UNKNOWN, p.CONTROL: CONTROL, p.USER_DEFINED: USER_DEFINED, p.UNUSED: UNUSED, p.BYTE: BYTE}
    return [kinds[piece.type] for piece in proto.pieces]


def hf_spm(proto, legacy):
    """Hugging Face's form of a SentencePiece vocabulary, for where special tokens put the prefix space."""
    types = proto_types(proto)
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges = []
    for i, piece in enumerate(proto.pieces):
        if types[i] != NORMAL:
            continue
        for cut in range(1, len(piece.piece)):
            pair = piece.piece[:cut], piece.piece[cut:]
            if all(part in vocab and types[vocab[part]] in (NORMAL, USER_DEFINED) for part in pair):
                merges.append((-piece.score, i, pair))
    merges.sort(key=lambda m: m[:2])
    tok = Tokenizer(models.BPE(vocab, [m[2] for m in merges], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if legacy:
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tok.add_tokens([AddedToken(p.piece.replace("▁", " "), normalized=False) for p, t in zip(proto.pieces, types) if t == USER_DEFINED])
    tok.add_special_tokens([AddedToken(p.piece, normalized=False, special=True) for p, t in zip(proto.pieces, types) if t == CONTROL])
    return tok


def fields(r, name):
    field = r.fields.get(f"tokenizer.ggml.{name}")
    return None if field is None else field.contents()


def real(path, corpus):
    import gguf

    r = gguf.GGUFReader(path)
    tokens, types = fields(r, "tokens"), fields(r, "token_type")
    sha = hashlib.sha256("\n".join(tokens).encode()).hexdigest()
    if fields(r, "model") == "gpt2":
        pre = fields(r, "pre")
        pick = lambda kind: [t for t, k in zip(tokens, types) if k == kind]
        tok = byte_bpe(tokens, fields(r, "merges"), pick(CONTROL), pick(USER_DEFINED), [pre], SPLITS[pre])
        encode = lambda text: plain(tok).encode(text, add_special_tokens=False).ids
    else:
        proto = pb.ModelProto()
        proto.trainer_spec.model_type = 2
        proto.trainer_spec.byte_fallback = True
        proto.trainer_spec.unk_id = fields(r, "unknown_token_id")
        proto.trainer_spec.bos_id, proto.trainer_spec.eos_id = fields(r, "bos_token_id"), fields(r, "eos_token_id")
        proto.normalizer_spec.name = "identity"
        prefix = fields(r, "add_space_prefix")
        proto.normalizer_spec.add_dummy_prefix = True if prefix is None else bool(prefix)
        proto.normalizer_spec.remove_extra_whitespaces = False
        proto.normalizer_spec.escape_whitespaces = True
        for text, score, kind in zip(tokens, fields(r, "scores"), types):
            piece = proto.pieces.add()
            piece.piece, piece.score, piece.type = text.replace(" ", "▁"), score, kind
        processor = spm.SentencePieceProcessor(model_proto=proto.SerializeToString())
        encode = processor.encode
    return sha, {"pre": fields(r, "pre"), "ids": [encode(text) for text in corpus]}


def main():
    corpus = json.loads(pathlib.Path(sys.argv[1]).read_text())
    out = pathlib.Path(sys.argv[2])

    tokens, merges = train_bpe(corpus)
    types = [NORMAL] * len(tokens) + [CONTROL] * len(CONTROLS) + [USER_DEFINED]
    tokens = tokens + CONTROLS + [MARK]
    made = {"tokens": tokens, "token_types": types, "merges": merges, "splits": {}}
    for pre, steps in SPLITS.items():
        tok = byte_bpe(tokens, merges, CONTROLS, [MARK], [pre], steps)
        user = plain(tok)
        made["splits"][pre] = {
            "text": [user.encode(text, add_special_tokens=False).ids for text in corpus],
            "special": [tok.encode(text, add_special_tokens=False).ids for text in SPECIAL_CASES],
        }
    (out / "made-bpe.json").write_text(json.dumps(made | {"special_cases": SPECIAL_CASES}, ensure_ascii=False) + "\n")

    spms = []
    for dummy_prefix in (True, False):
        model = train_spm(corpus, dummy_prefix)
        proto = pb.ModelProto.FromString(model)
        processor = spm.SentencePieceProcessor(model_proto=model)
        entry = {
            "add_space_prefix": dummy_prefix,
            "tokens": [p.piece for p in proto.pieces],
            "scores": [p.score for p in proto.pieces],
            "token_types": proto_types(proto),
            "text": [processor.encode(text) for text in corpus],
        }
        if dummy_prefix:
            # Hugging Face, whose form the models are published in, also puts the prefix after user-defined tokens.
            user = plain(hf_spm(proto, True))
            entry["text"] = [
                user.encode(text, add_special_tokens=False).ids if MARK in text else expected
                for text, expected in zip(corpus, entry["text"])
            ]
            for legacy in (True, False):
                tok = hf_spm(proto, legacy)
                entry["legacy" if legacy else "non_legacy"] = [
                    tok.encode(text, add_special_tokens=False).ids for text in SPECIAL_CASES
                ]
        spms.append(entry)
    (out / "made-spm.json").write_text(json.dumps({"special_cases": SPECIAL_CASES, "models": spms}, ensure_ascii=False) + "\n")

    found = dict(real(path, corpus) for path in sys.argv[3:])
    if found:
        (out / "real.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
