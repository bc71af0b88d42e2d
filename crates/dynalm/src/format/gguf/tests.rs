//! Hostile files (declared lengths, dimensions, names, truncation, types, things that are no models) and round trips.

use std::fs;
use std::path::{Path, PathBuf};

use dynair::QuantType;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::format::value::{Array, Strings, Value};
use crate::format::{GgufLayout, GgufWriter};

/// A file built from parts, which may lie about everything.
#[derive(Default)]
struct Raw {
    version: Option<u32>,
    keys: Vec<Vec<u8>>,
    key_count: Option<u64>,
    tensors: Vec<Vec<u8>>,
    tensor_count: Option<u64>,
    data: usize,
}

fn string(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s].concat()
}

impl Raw {
    /// A metadata entry with the bytes of its value.
    fn key(mut self, name: &str, type_id: u32, value: &[u8]) -> Raw {
        self.keys.push(
            [
                string(name.as_bytes()),
                type_id.to_le_bytes().to_vec(),
                value.to_vec(),
            ]
            .concat(),
        );
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64], type_id: u32, offset: u64) -> Raw {
        let mut entry = string(name.as_bytes());
        entry.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| entry.extend(d.to_le_bytes()));
        entry.extend(type_id.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        self.tensors.push(entry);
        self
    }

    fn data(mut self, bytes: usize) -> Raw {
        self.data = bytes;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.unwrap_or(3).to_le_bytes());
        out.extend(
            self.tensor_count
                .unwrap_or(self.tensors.len() as u64)
                .to_le_bytes(),
        );
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        self.keys.iter().chain(&self.tensors).for_each(|e| out.extend(e));
        if self.data > 0 {
            out.resize(out.len().next_multiple_of(32) + self.data, 7);
        }
        out
    }

    /// The message with which the file is refused.
    #[track_caller]
    fn refused(&self) -> String {
        refused(&self.bytes())
    }
}

#[track_caller]
fn refused(bytes: &[u8]) -> String {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, bytes).unwrap();
    let message = Gguf::open(&path)
        .expect_err("the file must be refused")
        .to_string();
    assert!(message.contains("m.gguf"), "{message}");
    message
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// Every value type, two tensors.
fn sample_layout() -> GgufLayout {
    let mut layout = GgufLayout::new();
    layout
        .set_str("general.architecture", "llama")
        .set("t.u8", Value::U8(200))
        .set("t.i8", Value::I8(-5))
        .set("t.u16", Value::U16(60_000))
        .set("t.i16", Value::I16(-30_000))
        .set_u32("t.u32", 4_000_000_000)
        .set("t.i32", Value::I32(-7))
        .set_f32("t.f32", 1.5)
        .set_bool("t.bool", true)
        .set("t.u64", Value::U64(u64::MAX))
        .set("t.i64", Value::I64(i64::MIN))
        .set("t.f64", Value::F64(0.1))
        .set("a.u8", Value::Array(Array::U8(vec![1, 2])))
        .set("a.i8", Value::Array(Array::I8(vec![-1])))
        .set("a.u16", Value::Array(Array::U16(vec![1])))
        .set("a.i16", Value::Array(Array::I16(vec![-1])))
        .set("a.u32", Value::Array(Array::U32(vec![1, 2, 3])))
        .set("a.i32", Value::Array(Array::I32(vec![-1, 2])))
        .set("a.f32", Value::Array(Array::F32(vec![0.5, -0.5])))
        .set("a.bool", Value::Array(Array::Bool(vec![true, false])))
        .set(
            "a.str",
            Value::Array(Array::Str(["a", "", "ёж"].iter().collect())),
        )
        .set(
            "a.a",
            Value::Array(Array::Array(vec![
                Array::U8(vec![1]),
                Array::Str(Strings::default()),
            ])),
        )
        .set("a.u64", Value::Array(Array::U64(vec![u64::MAX])))
        .set("a.i64", Value::Array(Array::I64(vec![-1])))
        .set("a.f64", Value::Array(Array::F64(vec![0.25])));
    layout
        .tensor("q", DType::Quant(QuantType::Q4_0), &[64, 3])
        .unwrap();
    layout.tensor("x", DType::F32, &[5, 2, 3]).unwrap();
    layout
}

fn sample() -> Vec<u8> {
    let mut w = GgufWriter::new(Vec::new(), &sample_layout()).unwrap();
    w.write(&[3; 100]).unwrap();
    w.write(&[4; 8]).unwrap();
    w.write(&[5; 120]).unwrap();
    w.finish().unwrap()
}

fn write(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn what_is_written_is_read() {
    let dir = TempDir::new().unwrap();
    let g = Gguf::open(&write(dir.path(), "m.gguf", &sample())).unwrap();
    assert_eq!(g.version(), 3);
    let found: Vec<_> = g.metadata().iter().collect();
    let layout = sample_layout();
    assert_eq!(found, layout.metadata().iter().collect::<Vec<_>>());
    assert_eq!(g.find("q"), Some((DType::Quant(QuantType::Q4_0), 3, 64)));
    assert_eq!(g.find("x"), Some((DType::F32, 6, 5)));
    assert_eq!(g.find("y"), None);
    assert_eq!(
        g.bytes("q").unwrap().as_slice(),
        [[3; 100].as_slice(), &[4; 8]].concat()
    );
    assert_eq!(g.bytes("x").unwrap().as_slice(), [5; 120]);
    assert_eq!(g.tensor("x").unwrap().range.start % 32, 0);
    assert_eq!(g.file_bytes() % 32, 0);
}

#[test]
fn version_2_and_other_alignments_are_read() {
    let dir = TempDir::new().unwrap();
    let mut bytes = sample();
    bytes[4] = 2;
    assert_eq!(
        Gguf::open(&write(dir.path(), "v2.gguf", &bytes))
            .unwrap()
            .version(),
        2
    );

    let mut layout = sample_layout();
    layout.set_u32(ALIGNMENT_KEY, 4096);
    let mut w = GgufWriter::new(Vec::new(), &layout).unwrap();
    w.write(&[3; 108]).unwrap();
    w.write(&[5; 120]).unwrap();
    let g = Gguf::open(&write(dir.path(), "a.gguf", &w.finish().unwrap())).unwrap();
    assert_eq!(g.tensor("x").unwrap().range.start % 4096, 0);
    assert_eq!(g.bytes("x").unwrap().as_slice(), [5; 120]);
}

#[test]
fn typed_access_converts_or_refuses() {
    let dir = TempDir::new().unwrap();
    let g = Gguf::open(&write(dir.path(), "m.gguf", &sample())).unwrap();
    let m = g.metadata();
    assert_eq!(m.get::<u32>("t.u8").unwrap(), Some(200));
    assert_eq!(m.get::<f32>("t.f64").unwrap(), Some(0.1));
    assert_eq!(m.get::<usize>("absent").unwrap(), None);
    assert_eq!(m.need::<&str>("general.architecture").unwrap(), "llama");
    assert_eq!(m.need::<Vec<u32>>("a.u8").unwrap(), [1, 2]);
    assert_eq!(m.need::<&[f32]>("a.f32").unwrap(), [0.5, -0.5]);
    assert_eq!(
        m.need::<&Strings>("a.str").unwrap().iter().collect::<Vec<_>>(),
        ["a", "", "ёж"]
    );
    let message = m.get::<u32>("t.i32").unwrap_err().to_string();
    assert_says(&message, &["`t.i32`", "-7", "expected an integer from 0"]);
    assert_says(
        &m.need::<Vec<u32>>("a.i32").unwrap_err().to_string(),
        &["`a.i32`"],
    );
    assert_says(
        &m.need::<u32>("llama.block_count").unwrap_err().to_string(),
        &["`llama.block_count` is missing"],
    );
}

/// Peak resident memory of this process, KiB, where the system tells.
fn peak_kib() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))?
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .ok()
}

#[test]
fn declared_lengths_are_held_against_the_file() {
    let before = peak_kib();
    let value = |n: u64| [&n.to_le_bytes()[..], &[b'x'; 90]].concat();
    for n in [1u64 << 30, 1 << 63, u64::MAX] {
        assert_says(
            &Raw::default().key("a.b", 8, &value(n)).refused(),
            &["`a.b`", &n.to_string(), "90 bytes are left"],
        );
    }
    for element in [0u32, 4, 8, 9, 10] {
        let array = [&element.to_le_bytes()[..], &value(1 << 40)].concat();
        assert_says(
            &Raw::default().key("a.b", 9, &array).refused(),
            &["`a.b`", "1099511627776"],
        );
    }
    let mut raw = Raw {
        key_count: Some(1 << 60),
        ..Raw::default()
    };
    assert_says(&raw.refused(), &["metadata keys", "1152921504606846976"]);
    raw = Raw {
        tensor_count: Some(u64::MAX),
        ..Raw::default()
    };
    assert_says(&raw.refused(), &["tensors", "18446744073709551615"]);
    let long_name = [
        b"GGUF".as_slice(),
        &3u32.to_le_bytes(),
        &[0; 8],
        &1u64.to_le_bytes(),
        &value(1 << 40),
    ]
    .concat();
    assert_says(&refused(&long_name), &["key number 0", "1099511627776"]);
    if let (Some(before), Some(after)) = (before, peak_kib()) {
        assert!(
            after - before < 64 * 1024,
            "resident memory grew from {before} to {after} KiB"
        );
    }
}

#[test]
fn zero_dimensions_and_empty_names_are_refused() {
    let raw = Raw::default().tensor("blk.0.x", &[8, 0, 3], 0, 0);
    assert_says(&raw.refused(), &["`blk.0.x`", "dimension 1"]);
    assert_says(
        &Raw::default().key("", 0, &[1]).refused(),
        &["key number 0", "empty"],
    );
    assert_says(
        &Raw::default().tensor("", &[1], 0, 0).data(32).refused(),
        &["tensor number 0", "empty"],
    );
    assert_says(
        &Raw::default()
            .tensor("t", &[], 0, 0)
            .key("pad", 10, &[0; 8])
            .refused(),
        &["`t`", "0 dimensions"],
    );
    assert_says(
        &Raw::default().tensor("t", &[1; 5], 0, 0).refused(),
        &["`t`", "5 dimensions"],
    );
}

#[test]
fn sizes_that_wrap_are_too_large() {
    let wraps = Raw::default()
        .tensor("token_embd.weight", &[2048, (1 << 51) + 1], 0, 0)
        .data(8192);
    assert_says(&wraps.refused(), &["`token_embd.weight`", "too large"]);
    let wraps = Raw::default()
        .tensor("token_embd.weight", &[1 << 63, 4, 1, 1], 0, 0)
        .data(8192);
    assert_says(&wraps.refused(), &["`token_embd.weight`", "too large"]);
    let big = Raw::default().tensor("t", &[1 << 61], 0, 0).data(32);
    assert_says(&big.refused(), &["`t`", "too large"]);
    let offset = Raw::default().tensor("t", &[8], 0, u64::MAX - 31).data(32);
    assert_says(&offset.refused(), &["`t`", "too large"]);
}

#[test]
fn names_that_stand_twice_are_refused_with_both_places() {
    let twice = Raw::default()
        .tensor("blk.0.attn_q.weight", &[8], 0, 0)
        .tensor("blk.0.attn_q.weight", &[8], 0, 32)
        .data(64);
    assert_says(
        &twice.refused(),
        &["`blk.0.attn_q.weight`", "byte 24 ", "byte 75"],
    );
    let twice = Raw::default().key("a.b", 0, &[1]).key("a.b", 0, &[2]);
    assert_says(&twice.refused(), &["`a.b`", "byte 24 ", "byte 40"]);
    assert_eq!(
        twice.refused().split_once("m.gguf").unwrap().1,
        twice.refused().split_once("m.gguf").unwrap().1
    );
}

#[test]
fn a_cut_file_is_refused_with_the_missing_bytes() {
    let bytes = sample();
    let message = refused(&bytes[..bytes.len() - 40]);
    // 8 bytes of padding at the end are not missed.
    assert_says(&message, &["tensor `x`", "32 bytes are missing"]);
    for n in 1..bytes.len() - 128 {
        refused(&bytes[..n]);
    }
}

#[test]
fn tensor_types_are_known_supported_or_named() {
    let with = |id| Raw::default().tensor("blk.1.w", &[256, 2], id, 0).data(2048);
    assert_says(&with(9999).refused(), &["`blk.1.w`", "9999", "not a known"]);
    assert_says(&with(15).refused(), &["`blk.1.w`", "15 (Q8_K)", "not supported"]);
    assert_says(
        &with(31).refused(),
        &["`blk.1.w`", "31 (Q4_0_4_4)", "not supported"],
    );
    for dtype in DType::WEIGHTS {
        assert_eq!(type_of(type_id(dtype)).unwrap(), dtype);
    }
    let ragged = Raw::default()
        .tensor("t", &[33], type_id(DType::Quant(QuantType::Q8_0)), 0)
        .data(64);
    assert_says(&ragged.refused(), &["`t`", "[33]", "blocks of 32"]);
}

#[test]
fn placement_is_checked() {
    let overlap = Raw::default()
        .tensor("a", &[16], 0, 0)
        .tensor("b", &[8], 0, 32)
        .data(64);
    assert_says(&overlap.refused(), &["`a`", "overlaps", "`b`"]);
    let same = Raw::default()
        .tensor("a", &[8], 0, 0)
        .tensor("b", &[8], 0, 0)
        .data(64);
    assert_says(&same.refused(), &["overlaps"]);
    let odd = Raw::default().tensor("a", &[8], 0, 4).data(64);
    assert_says(&odd.refused(), &["`a`", "offset 4", "alignment 32"]);
    for bad in [0u32, 4, 24, 3 << 20, 1 << 31] {
        let raw = Raw::default().key(ALIGNMENT_KEY, 4, &bad.to_le_bytes());
        assert_says(&raw.refused(), &[ALIGNMENT_KEY, &bad.to_string(), "power of two"]);
    }
    assert_says(
        &Raw::default()
            .key(ALIGNMENT_KEY, 5, &(-8i32).to_le_bytes())
            .refused(),
        &[ALIGNMENT_KEY],
    );
}

#[test]
fn values_are_checked() {
    assert_says(
        &Raw::default().key("a", 7, &[2]).refused(),
        &["`a`", "boolean is 2"],
    );
    assert_says(&Raw::default().key("a", 13, &[2]).refused(), &["`a`", "type 13"]);
    let array = |id: u32, n: u64, rest: &[u8]| [&id.to_le_bytes()[..], &n.to_le_bytes(), rest].concat();
    assert_says(
        &Raw::default().key("a", 9, &array(13, 0, &[])).refused(),
        &["`a`", "type 13"],
    );
    assert_says(
        &Raw::default().key("a", 8, &string(&[b'x', 0xff])).refused(),
        &["`a`", "not UTF-8"],
    );
    let mut nested = array(0, 0, &[]);
    for _ in 0..5 {
        nested = array(9, 1, &nested);
    }
    assert_says(&Raw::default().key("a", 9, &nested).refused(), &["`a`", "nested"]);
    let mut deep = Vec::new();
    for _ in 0..100_000 {
        deep.extend(array(9, 1, &[]));
    }
    assert_says(&Raw::default().key("a", 9, &deep).refused(), &["`a`", "nested"]);
}

#[test]
fn versions_and_byte_orders_are_named() {
    let with = |v: u32| {
        Raw {
            version: Some(v),
            ..Raw::default()
        }
        .refused()
    };
    assert_says(&with(1), &["version 1"]);
    assert_says(&with(4), &["version 4", "2 and 3"]);
    assert_says(&with(3u32.swap_bytes()), &["big-endian", "little-endian"]);
    assert_says(&refused(b"FUGG\0\0\0\x03"), &["big-endian"]);
}

#[test]
fn what_is_no_model_is_named_with_the_next_step() {
    let pointer = format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 98362432\n",
        "a".repeat(64)
    );
    assert_says(
        &refused(pointer.as_bytes()),
        &["Git LFS pointer", "98362432 bytes", "git lfs pull"],
    );
    assert_says(
        &refused(b"\n <!DOCTYPE html><html><body>404"),
        &["web page", "dynalm pull"],
    );
    assert_says(&refused(b""), &["0 bytes", "fetch it again"]);
    assert_says(&refused(b"PK\x03\x04\x14\0"), &["zip archive"]);
    assert_says(
        &refused(b"\x40\0\0\0\0\0\0\0{\"a\":1}"),
        &["SafeTensors", "GGUF form"],
    );
    assert_says(&refused(b"{\"error\":\"x\"}"), &["JSON"]);
    assert_says(&refused(&[0; 600]), &["zeros"]);
    assert_says(&refused(b"tjgg\x03\0\0\0"), &["before GGUF"]);
    assert_says(&refused(b"\x80\x02}q"), &["pickle"]);
    assert_says(&refused(b"\x01\x02ab"), &["01 02 61 62", "GGUF"]);
    let dir = TempDir::new().unwrap();
    assert_says(
        &Gguf::open(dir.path()).unwrap_err().to_string(),
        &["folder", ".gguf file inside"],
    );
    let missing = Gguf::open(&dir.path().join("nope.gguf")).unwrap_err().to_string();
    assert_says(&missing, &["nope.gguf", "No such file"]);
}

#[test]
fn a_header_can_be_read_from_the_beginning_of_a_file() {
    let bytes = sample();
    let path = Path::new("m.gguf");
    let mut n = 4;
    let header = loop {
        match header::parse(path, &bytes[..n as usize], bytes.len() as u64) {
            Ok(header) => break header,
            Err(Fault::NeedMore(more)) => {
                assert!(more > n, "asks for {more} of {n}");
                n = more;
            }
            Err(Fault::Refused(detail)) => panic!("{detail}"),
        }
    };
    assert_eq!(header.tensors.len(), 2);
    assert!((n as usize) < bytes.len() - 128);
}

/// Part `no` of `count`, with one tensor of 8 numbers for each name.
fn part(no: usize, count: usize, total: i32, tensors: &[&str], extra: &[(&str, u32)]) -> Vec<u8> {
    let mut layout = GgufLayout::new();
    layout.set("split.no", Value::U16(no as u16));
    layout.set("split.count", Value::U16(count as u16));
    layout.set("split.tensors.count", Value::I32(total));
    if no == 0 {
        layout.set_str("general.architecture", "llama");
    }
    extra.iter().for_each(|(k, v)| {
        layout.set_u32(k, *v);
    });
    tensors.iter().for_each(|t| {
        layout.tensor(t, DType::F32, &[8]).unwrap();
    });
    let mut w = GgufWriter::new(Vec::new(), &layout).unwrap();
    tensors
        .iter()
        .for_each(|t| w.write(&[t.as_bytes()[0]; 32]).unwrap());
    w.finish().unwrap()
}

fn write_parts(dir: &Path, parts: &[Vec<u8>]) -> Vec<PathBuf> {
    let name = |i| format!("m-{:05}-of-{:05}.gguf", i + 1, parts.len());
    parts
        .iter()
        .enumerate()
        .map(|(i, p)| write(dir, &name(i), p))
        .collect()
}

#[test]
fn any_part_opens_a_split_checkpoint() {
    let dir = TempDir::new().unwrap();
    let parts = [
        part(0, 3, 4, &["a", "b"], &[]),
        part(1, 3, 4, &["c"], &[]),
        part(2, 3, 4, &["d"], &[]),
    ];
    for path in write_parts(dir.path(), &parts) {
        let g = Gguf::open(&path).unwrap();
        assert_eq!(g.paths().len(), 3);
        assert_eq!(
            g.metadata().need::<&str>("general.architecture").unwrap(),
            "llama"
        );
        let names: Vec<_> = g.tensors().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c", "d"]);
        for name in names {
            assert_eq!(g.bytes(name).unwrap().as_slice(), [name.as_bytes()[0]; 32]);
        }
    }
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let message = |parts: &[Vec<u8>]| {
        let dir = TempDir::new().unwrap();
        let paths = write_parts(dir.path(), parts);
        Gguf::open(&paths[0]).unwrap_err().to_string()
    };
    let clash = message(&[part(0, 2, 2, &["a"], &[]), part(1, 2, 2, &["a"], &[])]);
    assert_says(
        &clash,
        &[
            "tensor `a` stands twice",
            "00001-of-00002",
            "00002-of-00002",
            "byte",
        ],
    );
    assert_says(
        &message(&[part(0, 2, 3, &["a"], &[]), part(1, 2, 3, &["b"], &[])]),
        &["split.tensors.count", "3"],
    );
    assert_says(
        &message(&[part(0, 2, 2, &["a"], &[]), part(0, 2, 2, &["b"], &[])]),
        &["split.no", "00002-of"],
    );
    assert_says(
        &message(&[part(0, 3, 2, &["a"], &[]), part(1, 3, 2, &["b"], &[])]),
        &["2 parts", "says 3"],
    );
    let differs = message(&[
        part(0, 2, 2, &["a"], &[("k", 1)]),
        part(1, 2, 2, &["b"], &[("k", 2)]),
    ]);
    assert_says(&differs, &["`k`", "00002-of"]);
    let cut = part(1, 2, 2, &["b"], &[]);
    let cut = message(&[part(0, 2, 2, &["a"], &[]), cut[..cut.len() - 4].to_vec()]);
    assert_says(&cut, &["00002-of-00002", "`b`", "4 bytes are missing"]);
}

#[test]
fn missing_parts_and_renamed_parts_are_named() {
    let dir = TempDir::new().unwrap();
    let paths = write_parts(
        dir.path(),
        &[part(0, 2, 2, &["a"], &[]), part(1, 2, 2, &["b"], &[])],
    );
    let renamed = write(dir.path(), "model.gguf", &fs::read(&paths[0]).unwrap());
    assert_says(
        &Gguf::open(&renamed).unwrap_err().to_string(),
        &["2 parts", "original names"],
    );
    fs::remove_file(&paths[1]).unwrap();
    assert_says(
        &Gguf::open(&paths[0]).unwrap_err().to_string(),
        &["m-00002-of-00002.gguf` is missing"],
    );
    let plain = write(dir.path(), "x-00001-of-00002.gguf", &sample());
    assert_says(
        &Gguf::open(&plain).unwrap_err().to_string(),
        &["part 1 of 2", "split.count"],
    );
}

#[test]
fn the_writer_holds_callers_to_the_layout() {
    let mut layout = GgufLayout::new();
    layout.tensor("t", DType::F32, &[2]).unwrap();
    assert!(layout.tensor("t", DType::F32, &[2]).is_err());
    assert!(layout.tensor("u", DType::F32, &[2, 0]).is_err());
    assert!(layout.tensor("v", DType::Quant(QuantType::Q8_0), &[31]).is_err());
    assert!(layout.tensor("w", DType::F32, &[usize::MAX, 2]).is_err());
    let mut w = GgufWriter::new(Vec::new(), &layout).unwrap();
    assert!(w.write(&[0; 9]).is_err());
    w.write(&[0; 4]).unwrap();
    assert!(w.finish().unwrap_err().to_string().contains("4 of 8 bytes"));
    let mut w = GgufWriter::new(Vec::new(), &layout).unwrap();
    w.write(&[0; 8]).unwrap();
    assert!(w.write(&[0]).is_err());
    layout.set_u32(ALIGNMENT_KEY, 12);
    assert!(GgufWriter::new(Vec::new(), &layout).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever is done to a valid file, reading it answers; what is accepted lies inside the file.
    #[test]
    fn damaged_files_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = sample();
        let n = bytes.len();
        for (at, value) in flips {
            bytes[at.index(n)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(n));
        }
        if let Ok(header) = header::parse(Path::new("m.gguf"), &bytes, bytes.len() as u64) {
            for t in header.tensors {
                prop_assert!(t.start + t.bytes <= bytes.len() as u64);
                prop_assert!(t.bytes > 0);
            }
        }
    }
}
