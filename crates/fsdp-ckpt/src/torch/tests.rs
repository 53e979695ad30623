//! Handmade archives: storages with false lengths, views out of bounds, and files that are refused by name.

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::{
    bytes::Memory,
    checkpoint::{Global, Region, Value},
    formats::local::LocalTensor,
    pickle::writer::PickleWriter,
    safetensors::TensorType,
    zip::writer,
};

/// An archive of these records.
fn archive(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = writer::Archive::new();
    records.iter().for_each(|(name, data)| archive.add(name, data));
    let mut bytes = vec![0; archive.len() as usize];
    for (at, part) in archive.take_literals().into_iter().chain(archive.finish([])) {
        bytes[at as usize..at as usize + part.len()].copy_from_slice(&part);
    }
    bytes
}

fn open_bytes(bytes: &[u8]) -> Result<TorchFile, String> {
    let (bytes, len) = (Memory(bytes.to_vec()), bytes.len() as u64);
    open(Section::new(&bytes, 0..len, Path::new("x.pt"), "")).map_err(|error| error.to_string())
}

/// The metadata of a tensor, which may be false.
#[derive(Clone)]
struct Claim {
    class: (&'static str, &'static str),
    count: u64,
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
    dtype: Option<&'static str>,
}

fn claim() -> Claim {
    Claim {
        class: ("torch", "FloatStorage"),
        count: 6,
        offset: 0,
        shape: vec![2, 3],
        strides: vec![3, 1],
        dtype: None,
    }
}

/// A file with one tensor, described by `claim`, over a storage of `len` bytes.
fn file_of(claim: &Claim, len: usize) -> Vec<u8> {
    let mut w = PickleWriter::new();
    let function = if claim.dtype.is_some() { "_rebuild_tensor_v3" } else { "_rebuild_tensor_v2" };
    w.call("torch._utils", function, |w| {
        w.persistent(|w| {
            w.text("storage");
            w.global(claim.class.0, claim.class.1);
            w.text("0");
            w.text("cuda:7");
            w.count(claim.count);
        });
        w.count(claim.offset);
        w.counts(&claim.shape);
        w.counts(&claim.strides);
        w.bool(false);
        w.call("collections", "OrderedDict", |_| ());
        claim.dtype.iter().for_each(|dtype| w.global("torch", dtype));
    });
    archive(&[("x/data.pkl", &w.finish()), ("x/byteorder", b"little"), ("x/data/0", &vec![7; len])])
}

fn tensor(claim: &Claim, len: usize) -> Result<StoredTensor, String> {
    match open_bytes(&file_of(claim, len))?.root {
        Item::Tensor(tensor) => Ok(tensor),
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensor_offset_and_region_follow_storage_view() {
    let whole = tensor(&claim(), 24).unwrap();
    assert_eq!((whole.dtype, &whole.shape[..]), (TensorType::F32, &[2, 3][..]));
    assert_eq!(LocalTensor::of(&whole, 4).whole().region, Region::Flat(0..6));
    let part = Claim { offset: 2, shape: vec![2, 2], strides: vec![2, 1], ..claim() };
    assert_eq!(tensor(&part, 24).unwrap().offset, whole.offset + 8);
    let transposed = Claim { shape: vec![3, 2], strides: vec![1, 3], ..claim() };
    assert!(matches!(
        LocalTensor::of(&tensor(&transposed, 24).unwrap(), 0).whole().region,
        Region::Box { .. }
    ));
}

#[test]
fn untyped_storage_length_is_in_bytes() {
    let untyped =
        Claim { class: ("torch.storage", "UntypedStorage"), count: 12, dtype: Some("uint16"), ..claim() };
    assert_eq!(tensor(&untyped, 12).unwrap().dtype, TensorType::U16);
    let fault = tensor(&Claim { dtype: None, ..untyped.clone() }, 12).unwrap_err();
    assert!(fault.contains("no type"), "{fault}");
    assert!(tensor(&Claim { dtype: Some("int32"), ..untyped }, 12).unwrap_err().contains("reaches beyond"));
}

#[test]
fn rejects_storage_length_mismatch() {
    for (count, len) in [(6, 20), (6, 28), (6, 0), (u64::MAX / 2, 24), (1 << 62, 0)] {
        let fault = tensor(&Claim { count, ..claim() }, len).unwrap_err();
        assert!(fault.contains("storage `0`"), "{fault}");
    }
}

#[test]
fn rejects_views_beyond_their_storage() {
    let beyond = [
        Claim { offset: 1, ..claim() },
        Claim { shape: vec![3, 3], ..claim() },
        Claim { strides: vec![4, 1], ..claim() },
        Claim { strides: vec![u64::MAX / 2, 1], ..claim() },
        Claim { strides: vec![i64::MAX as u64, i64::MAX as u64], shape: vec![9, 9], ..claim() },
        Claim { offset: i64::MAX as u64, ..claim() },
        Claim { shape: vec![], strides: vec![], offset: 6, ..claim() },
    ];
    for claim in beyond {
        let fault = tensor(&claim, 24).unwrap_err();
        assert!(fault.contains("reaches beyond") || fault.contains("not a tuple"), "{fault}");
    }
    let uncountable = Claim { shape: vec![1 << 40, 1 << 40], strides: vec![0, 0], ..claim() };
    assert!(tensor(&uncountable, 24).unwrap_err().contains("cannot be counted"));
    let ragged = Claim { strides: vec![1], ..claim() };
    assert!(tensor(&ragged, 24).unwrap_err().contains("as many strides"));
}

#[test]
fn empty_tensor_with_out_of_range_offset_is_accepted() {
    let empty = Claim { shape: vec![0, 5], strides: vec![5, 1], offset: 1 << 50, count: 0, ..claim() };
    let tensor = tensor(&empty, 0).unwrap();
    assert_eq!(LocalTensor::of(&tensor, 0).whole().region, Region::Flat(0..0));
}

#[test]
fn unsupported_tensor_kinds_are_opaque() {
    let opaque = |bytes: &[u8]| match open_bytes(bytes).unwrap().root {
        Item::Value(Value::Opaque(class)) => class.to_string(),
        other => panic!("{other:?}"),
    };
    let wide = Claim { class: ("torch", "ComplexDoubleStorage"), ..claim() };
    assert_eq!(opaque(&file_of(&wide, 96)), "torch.ComplexDoubleStorage");
    let untyped = ("torch.storage", "UntypedStorage");
    let wide = Claim { class: untyped, count: 96, dtype: Some("complex128"), ..claim() };
    assert_eq!(opaque(&file_of(&wide, 96)), "torch.complex128");
    for function in ["_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage"] {
        let mut w = PickleWriter::new();
        w.call("torch._utils", function, |w| (0..4).for_each(|_| w.none()));
        assert_eq!(opaque(&archive(&[("x/data.pkl", &w.finish())])), format!("torch._utils.{function}"));
    }
}

#[test]
fn non_archive_error_describes_content() {
    let mut tar = vec![b'x'; 300];
    tar[257..262].copy_from_slice(b"ustar");
    let legacy = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
    let cases: [(&[u8], &str); 5] = [
        (legacy, "it ends inside the protocol (at byte 15)"),
        (&tar, "tar archive"),
        (b"\x80\x02N.", "bare pickle"),
        (b"", "empty"),
        (b"\x08\0\0\0\0\0\0\0{}      ", "does not begin as a zip"),
    ];
    for (bytes, reason) in cases {
        let fault = open_bytes(bytes).unwrap_err();
        assert!(fault.starts_with("x.pt: ") && fault.contains(reason), "{fault}");
    }
}

#[test]
fn embedded_command_call_is_opaque() {
    let mut w = PickleWriter::new();
    w.dict(|w| {
        w.text("model");
        w.call("posix", "system", |w| w.text("touch /tmp/owned"));
    });
    let system = Global { module: "posix".into(), name: "system".into() };
    let expected = Item::Dict(vec![(Value::Str("model".into()), Item::Value(Value::Opaque(system)))]);
    assert_eq!(open_bytes(&archive(&[("x/data.pkl", &w.finish())])).unwrap().root, expected);
}

#[test]
fn damaged_pickle_is_detected_by_checksum() {
    let mut bytes = file_of(&claim(), 24);
    bytes[64 + 30] ^= 1;
    let fault = open_bytes(&bytes).unwrap_err();
    assert!(fault.contains("record `data.pkl` is damaged: the archive says crc32:"), "{fault}");
}

#[test]
fn rejects_big_endian_files_and_missing_records() {
    let none = PickleWriter::new();
    let pickle = {
        let mut w = none;
        w.none();
        w.finish()
    };
    let big = archive(&[("x/data.pkl", &pickle), ("x/byteorder", b"big")]);
    assert!(open_bytes(&big).unwrap_err().contains("little-endian"));
    assert!(open_bytes(&archive(&[("x/version", b"3")])).unwrap_err().contains("`data.pkl`"));
    assert!(open_bytes(&archive(&[("x/data.pkl", &pickle), ("y/data.pkl", &pickle)])).is_err());
    assert_eq!(open_bytes(&archive(&[("x/data.pkl", &pickle)])).unwrap().root, Item::Value(Value::None));
    let without_storage = archive(&[("x/data.pkl", &file_pickle())]);
    assert!(open_bytes(&without_storage).unwrap_err().contains("`data/0`"));
}

/// The pickle of a file with one tensor.
fn file_pickle() -> Vec<u8> {
    let mut w = PickleWriter::new();
    w.call("torch._utils", "_rebuild_tensor_v2", |w| {
        w.persistent(|w| {
            w.text("storage");
            w.global("torch", "FloatStorage");
            w.text("0");
            w.text("cpu");
            w.count(6);
        });
        w.int(0);
        w.counts(&[2, 3]);
        w.counts(&[3, 1]);
        w.bool(false);
        w.call("collections", "OrderedDict", |_| ());
    });
    w.finish()
}

#[test]
fn file_prefix_is_enough_to_locate_tensor() {
    let bytes = file_of(&claim(), 24);
    let whole = open_bytes(&bytes).unwrap();
    let Item::Tensor(tensor) = &whole.root else { panic!("a tensor") };
    for cut in 0..bytes.len() {
        let beginning = Memory(bytes[..cut].to_vec());
        let section = Section::new(&beginning, 0..cut as u64, Path::new("x.pt"), "");
        match open_beginning(section, bytes.len() as u64) {
            Ok(opened) => assert_eq!(opened.root, whole.root, "{cut} bytes"),
            Err(error) => assert!((cut as u64) < tensor.offset, "{cut} bytes: {error}"),
        }
    }
    let beginning = Memory(bytes[..tensor.offset as usize].to_vec());
    let section = Section::new(&beginning, 0..tensor.offset, Path::new("x.pt"), "");
    open_beginning(section, tensor.offset + 23).unwrap_err();
}

proptest! {
    #[test]
    fn view_is_accepted_only_if_inside_storage(
        offset in 0u64..30,
        dims in proptest::collection::vec((0u64..5, 0u64..12), 0..4),
        len in 0usize..40,
    ) {
        let (shape, strides): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
        let claim = Claim { count: len as u64 / 4, offset, shape, strides, ..claim() };
        let len = len / 4 * 4;
        // The simple model: every element of the view.
        let mut elements = vec![offset];
        for (dim, stride) in claim.shape.iter().zip(&claim.strides) {
            elements = elements.iter().flat_map(|at| (0..*dim).map(move |i| at + i * stride)).collect();
        }
        let inside = elements.iter().all(|&at| at < len as u64 / 4);
        prop_assert_eq!(tensor(&claim, len).is_ok(), inside);
    }
}
