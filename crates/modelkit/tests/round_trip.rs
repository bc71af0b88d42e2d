//! What is made is what the GGUF reader reads: keys, shapes, types and values.

use dynair::{DType, quant};
use dynalm::format::Gguf;
use modelkit::{read_vocab, tiny_gguf, write_gguf};
use testkit::checkpoint::{Mix, ModelShape, TensorSpec, make, tiny};
use testkit::vocab::Vocab;

#[test]
fn tiny_models_of_each_family_are_read_back() {
    let folder = tempfile::tempdir().unwrap();
    for family in ["llama", "qwen2", "qwen3", "gemma2", "gemma3"] {
        let path = tiny_gguf(folder.path(), family, "Q4_0", 3);
        assert!(path.metadata().unwrap().len() < 2_000_000);
        let made = tiny(family, Mix::named("Q4_0").unwrap(), 3);
        let read = Gguf::open(&path).unwrap();
        let keys = read.metadata();
        assert_eq!(keys.get::<&str>("general.architecture").unwrap(), Some(family));
        assert_eq!(keys.len(), made.metadata.len());
        assert!(keys.need::<u32>(&format!("{family}.block_count")).unwrap() >= 2);
        assert_eq!(read.tensors().len(), made.tensors.len());
        for (r, m) in read.tensors().iter().zip(&made.tensors) {
            assert_eq!((&r.name, r.dtype, &r.dims), (&m.name, m.dtype, &m.dims));
            assert_eq!(r.bytes(), m.bytes());
        }
        let bytes = std::fs::read(&path).unwrap();
        let t = read.tensor("blk.1.ffn_down.weight").unwrap();
        let values = quant::decode(t.dtype, &bytes[t.range.clone()], t.cols() * t.rows()).unwrap();
        let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(square > 0.0 && square < 1.0, "{family}: {square}");
        let norm = read.tensor("output_norm.weight").unwrap();
        assert_eq!(norm.dtype, DType::F32);
        let values = quant::decode(DType::F32, &bytes[norm.range.clone()], norm.cols()).unwrap();
        assert!(values.iter().all(|v| (v - 1.0).abs() < 0.7), "{family}");
    }
}

#[test]
fn every_weight_type_is_written_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in DType::WEIGHTS {
        let path = tiny_gguf(folder.path(), "llama", dtype.name(), 2);
        let made = tiny("llama", Mix::named(dtype.name()).unwrap(), 2);
        let (read, bytes) = (Gguf::open(&path).unwrap(), std::fs::read(&path).unwrap());
        let of_the_type = |m: &&TensorSpec| m.dtype == dtype;
        assert!(made.tensors.iter().any(|m| of_the_type(&m)), "{dtype}");
        for m in made.tensors.iter().filter(of_the_type) {
            let r = read.tensor(&m.name).unwrap();
            assert_eq!(r.dtype, dtype, "{}", m.name);
            assert!(
                bytes[r.range.clone()] == made.tensor_bytes(m),
                "{dtype}, {}",
                m.name
            );
        }
    }
}

#[test]
fn a_vocabulary_is_taken_from_another_file() {
    let folder = tempfile::tempdir().unwrap();
    let first = tiny_gguf(folder.path(), "qwen3", "Q8_0", 1);
    let vocab = read_vocab(&first).unwrap();
    assert_eq!(vocab, Vocab::small("gpt-2", Vocab::SMALL));
    let path = folder.path().join("second.gguf");
    let shape = ModelShape {
        layers: 1,
        ..ModelShape::named("tiny-gemma2").unwrap()
    };
    write_gguf(&make(&shape, Mix::named("F16").unwrap(), 0, &vocab), &path).unwrap();
    assert_eq!(read_vocab(&path).unwrap(), vocab);
    assert!(!folder.path().join("second.gguf.part").exists());
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("missing/model.gguf");
    let error = write_gguf(&tiny("llama", Mix::named("Q8_0").unwrap(), 0), &path)
        .unwrap_err()
        .to_string();
    assert!(error.contains("missing"), "{error}");
}
