//! Says what a file is that is not GGUF: a user who got a web page or a pointer instead of a model must be told so.

/// What the beginning of a file looks like and what to do about it; `None` where it could be GGUF.
pub(super) fn not_gguf(head: &[u8]) -> Option<String> {
    if head.starts_with(b"GGUF") {
        return None;
    }
    let text = String::from_utf8_lossy(&head[..head.len().min(512)]);
    let trimmed = text.trim_start_matches('\u{feff}').trim_start();
    let lower = trimmed.to_ascii_lowercase();
    if trimmed.starts_with("version https://git-lfs") {
        let size = trimmed
            .lines()
            .find_map(|l| l.strip_prefix("size "))
            .unwrap_or("an unknown number of");
        return Some(format!(
            "it is a Git LFS pointer, not the model itself ({size} bytes): run `git lfs pull` in the clone, or fetch the \
             model with `dynalm pull hf:OWNER/REPO`"
        ));
    }
    if lower.starts_with("<!doctype html") || lower.starts_with("<html") {
        return Some(
            "it is a web page, not a model: the download got an HTML page (a login, error or preview page); fetch the \
             file itself, for instance with `dynalm pull hf:OWNER/REPO`"
                .into(),
        );
    }
    if is_safetensors(head) {
        return Some(
            "it is a SafeTensors file; this version reads GGUF: get the GGUF form of the model".into(),
        );
    }
    let what = match head {
        [b'P', b'K', 3 | 5, 4 | 6, ..] => {
            "it is a zip archive (a PyTorch checkpoint, a wheel or an archive): unpack it, or get the GGUF form of the \
             model"
        }
        [b'F', b'U', b'G', b'G', ..] => {
            "it is a big-endian GGUF file; only little-endian files are supported: get the little-endian file of this \
             model"
        }
        [b'l' | b't' | b'f' | b'a', b'm' | b'j' | b'l', b'g', b'g', ..] => {
            "it is a GGML file from before GGUF; convert the model again with a current converter"
        }
        [0x80, 2..=5, ..] => "it is a Python pickle (a PyTorch checkpoint): get the GGUF form of the model",
        [0x1f, 0x8b, ..] => "it is a gzip archive: unpack it first",
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "it is an xz archive: unpack it first",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "it is a zstd archive: unpack it first",
        _ if trimmed.starts_with('{') || trimmed.starts_with('[') => {
            "it is JSON text, not a model (an error reply or a configuration): name the .gguf file"
        }
        _ if !head.is_empty() && head.iter().all(|&b| b == 0) => {
            "it begins with zeros: the download was never filled in; fetch it again"
        }
        _ => {
            let magic: String = head.iter().take(4).map(|b| format!("{b:02x} ")).collect();
            return Some(format!(
                "it is not a GGUF file: it begins with {} ({:?}), expected `GGUF`",
                magic.trim_end(),
                text.chars().take(4).collect::<String>()
            ));
        }
    };
    Some(what.into())
}

/// An 8-byte header length followed by a JSON object.
fn is_safetensors(head: &[u8]) -> bool {
    match head.split_first_chunk::<8>() {
        Some((length, rest)) => u64::from_le_bytes(*length) < 1 << 32 && rest.starts_with(b"{\""),
        None => false,
    }
}
