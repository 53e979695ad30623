//! Metadata as other versions write it, damaged or hostile metadata, and items that do not match it.

use std::{collections::BTreeMap, fs, path::Path};

use super::*;
use crate::{
    checkpoint::Region,
    pickle::writer::PickleWriter,
    safetensors::TensorType,
    targets::{
        self, Selection,
        assemble::{assemble, data_of, object, tensor},
    },
};

const METADATA: &str = "torch.distributed.checkpoint.metadata";

/// An item of the metadata.
#[derive(Clone, Debug)]
struct Listed {
    name: String,
    offset: Option<Vec<u64>>,
    sizes: Vec<u64>,
    file: String,
    start: u64,
    len: u64,
    transforms: Option<Vec<&'static str>>,
}

/// Metadata that a test can write incorrectly.
#[derive(Clone, Debug)]
struct Listing {
    /// Dtype and shape of tensors by name; their chunks are the items of the same name.
    tensors: BTreeMap<String, (TensorType, Vec<u64>)>,
    items: Vec<Listed>,
    /// Chunks that are listed but have no item.
    without_item: Vec<(String, Vec<u64>, Vec<u64>)>,
    property_module: &'static str,
    property_count: usize,
    root: (&'static str, &'static str),
    root_fields: Vec<&'static str>,
}

impl Listing {
    /// Reads the metadata of a directory.
    fn read(dir: &Path) -> Listing {
        let metadata = Metadata::read(&parse(&dir.join(METADATA_FILE)).unwrap()).unwrap();
        let (mut tensors, mut items) = (BTreeMap::new(), Vec::new());
        for entry in &metadata.entries {
            if let Kind::Tensor { dtype, shape, .. } = &entry.kind {
                tensors.insert(entry.name.clone(), (*dtype, shape.clone()));
            }
            items.extend(items::jobs_of(entry).into_iter().map(|job| Listed {
                name: entry.name.clone(),
                offset: job.chunk.map(|chunk| chunk.offsets.clone()),
                sizes: job.chunk.map(|chunk| chunk.sizes.clone()).unwrap_or_default(),
                file: metadata.files[job.location.file].clone(),
                start: job.location.range.start,
                len: job.location.range.end - job.location.range.start,
                transforms: None,
            }));
        }
        Listing {
            tensors,
            items,
            without_item: Vec::new(),
            property_module: METADATA,
            property_count: 5,
            root: (METADATA, "Metadata"),
            root_fields: Vec::new(),
        }
    }

    fn pickle(&self) -> Vec<u8> {
        let mut w = PickleWriter::new();
        w.object(self.root.0, self.root.1, |w| {
            w.dict(|w| {
                w.text("state_dict_metadata");
                w.dict(|w| self.entries(w));
                w.text("planner_data");
                w.none();
                w.text("storage_data");
                w.dict(|w| self.items.iter().for_each(|item| item.write(w)));
                for field in &self.root_fields {
                    w.text(field);
                    w.none();
                }
            });
        });
        w.finish()
    }

    fn entries(&self, w: &mut PickleWriter) {
        for item in self.items.iter().filter(|item| item.offset.is_none()) {
            w.text(&item.name);
            w.object(METADATA, "BytesStorageMetadata", |w| w.dict(|_| ()));
        }
        for (name, (dtype, shape)) in &self.tensors {
            w.text(name);
            w.object(METADATA, "TensorStorageMetadata", |w| {
                w.dict(|w| {
                    w.text("properties");
                    self.properties(w, *dtype);
                    w.text("size");
                    w.torch_size(shape);
                    w.text("chunks");
                    w.list(|w| self.chunks(w, name));
                });
            });
        }
    }

    fn properties(&self, w: &mut PickleWriter, dtype: TensorType) {
        w.object(self.property_module, "TensorProperties", |w| {
            w.tuple(|w| {
                w.global("torch", dtype.torch_name().unwrap());
                w.call("torch.serialization", "_get_layout", |w| w.text("torch.strided"));
                w.bool(false);
                w.call(METADATA, "_MEM_FORMAT_ENCODING", |w| w.int(0));
                (4..self.property_count).for_each(|_| w.none());
            });
        });
    }

    fn chunks(&self, w: &mut PickleWriter, name: &str) {
        let listed = self.items.iter().filter(|item| item.name == name);
        let listed = listed.map(|item| (item.offset.clone().unwrap(), item.sizes.clone()));
        let others = self.without_item.iter().filter(|chunk| chunk.0 == name);
        for (offsets, sizes) in listed.chain(others.map(|chunk| (chunk.1.clone(), chunk.2.clone()))) {
            w.object(METADATA, "ChunkStorageMetadata", |w| {
                w.dict(|w| {
                    w.text("offsets");
                    w.torch_size(&offsets);
                    w.text("sizes");
                    w.torch_size(&sizes);
                });
            });
        }
    }

    /// Replaces the metadata of the directory and opens the checkpoint.
    fn open(&self, dir: &Path) -> Result<Checkpoint, Error> {
        fs::write(dir.join(METADATA_FILE), self.pickle()).unwrap();
        open(dir)
    }

    /// The reason for which the checkpoint is refused.
    fn fault(&self, dir: &Path) -> String {
        match self.open(dir) {
            Err(Error::Malformed { reason, .. } | Error::Unsupported { reason, .. }) => reason,
            other => panic!("this must be refused: {other:?}"),
        }
    }
}

impl Listed {
    fn write(&self, w: &mut PickleWriter) {
        w.object(METADATA, "MetadataIndex", |w| {
            w.dict(|w| {
                w.text("fqn");
                w.text(&self.name);
                if let Some(offset) = &self.offset {
                    w.text("offset");
                    w.torch_size(offset);
                }
                // A hint, and a wrong one.
                w.text("index");
                w.int(99);
            });
        });
        w.object("torch.distributed.checkpoint.filesystem", "_StorageInfo", |w| {
            w.dict(|w| {
                w.text("relative_path");
                w.text(&self.file);
                w.text("offset");
                w.count(self.start);
                w.text("length");
                w.count(self.len);
                if let Some(transforms) = &self.transforms {
                    w.text("transform_descriptors");
                    w.list(|w| transforms.iter().for_each(|transform| w.text(transform)));
                }
            });
        });
    }
}

/// A directory of two ranks: `w` in two chunks of rows, `left` and `right` in one file, and a value.
fn directory() -> (tempfile::TempDir, Listing, BTreeMap<String, Vec<u8>>) {
    let selection = Selection {
        tensors: vec![
            tensor("left", TensorType::U8, &[1, 2]),
            tensor("right", TensorType::U8, &[1, 3]),
            tensor("w", TensorType::F32, &[5, 3]),
        ],
        values: vec![object("step", Value::Int(3))],
    };
    let dir = tempfile::tempdir().unwrap();
    let data = data_of(&selection);
    for (name, bytes) in assemble(targets::dcp::plan(&selection, 2).unwrap(), &data) {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let listing = Listing::read(dir.path());
    (dir, listing, data)
}

fn item<'a>(listing: &'a mut Listing, name: &str) -> &'a mut Listed {
    listing.items.iter_mut().find(|item| item.name == name).unwrap()
}

#[test]
fn tensor_properties_of_all_versions_are_read() {
    let (dir, listing, _) = directory();
    let expected = listing.open(dir.path()).unwrap();
    assert_eq!(expected.values["step"].value, Value::Int(3));
    let old = "torch.distributed._shard.sharded_tensor.metadata";
    for (module, count) in [(METADATA, 6), (old, 5)] {
        let listing = Listing { property_module: module, property_count: count, ..listing.clone() };
        assert_eq!(listing.open(dir.path()).unwrap().tensors, expected.tensors);
    }
    for count in [4, 7] {
        let listing = Listing { property_count: count, ..listing.clone() };
        let message = listing.fault(dir.path());
        assert!(message.contains("`left` is not a tensor with five or six properties"), "{message}");
    }
}

#[test]
fn bit_flip_in_planner_data_never_changes_names() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fsdp2/dcp").join(METADATA_FILE);
    let kept = fs::read(fixture).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let read = |bytes: &[u8]| {
        let path = dir.path().join(METADATA_FILE);
        fs::write(&path, bytes).unwrap();
        let metadata = parse(&path).ok().and_then(|graph| Metadata::read(&graph).ok())?;
        Some(metadata.entries.into_iter().map(|entry| (entry.name, entry.path)).collect::<Vec<_>>())
    };
    let find = |text: &[u8]| kept.windows(text.len()).position(|window| window == text).unwrap();
    let (start, end) = (find(b"planner_data") + b"planner_data".len(), find(b"storage_data"));
    let expected = read(&kept);
    for at in (start..end).step_by(3) {
        let mut bytes = kept.clone();
        bytes[at] ^= 1;
        let found = read(&bytes);
        assert!(found.is_none() || found == expected, "at byte {at} of {start}..{end}");
    }
}

#[test]
fn column_chunks_of_single_row_become_flat() {
    let (dir, mut listing, data) = directory();
    listing.tensors.remove("left");
    listing.tensors.remove("right");
    listing.tensors.insert("both".to_owned(), (TensorType::U8, vec![1, 5]));
    item(&mut listing, "left").name = "both".to_owned();
    let right = item(&mut listing, "right");
    (right.name, right.offset) = ("both".to_owned(), Some(vec![0, 2]));
    let checkpoint = listing.open(dir.path()).unwrap();
    checkpoint.check_coverage().unwrap();
    let mut found: Vec<u8> = Vec::new();
    let mut chunks = checkpoint.tensors["both"].chunks.clone();
    chunks.sort_by_key(|chunk| match &chunk.region {
        Region::Flat(range) => range.start,
        Region::Box { .. } => panic!("parts of one row lie together"),
    });
    for chunk in chunks {
        let file = fs::read(checkpoint.sources[chunk.source].path()).unwrap();
        found.extend(&file[chunk.offset as usize..][..chunk.region.len().unwrap() as usize]);
    }
    assert_eq!(found, [&data["left"][..], &data["right"]].concat());
}

#[test]
fn chunk_missing_from_tensor_or_storage_is_rejected() {
    let (dir, mut listing, _) = directory();
    let at = listing.items.iter().position(|item| item.offset == Some(vec![3, 0])).unwrap();
    let lost = listing.items.remove(at);
    let message = listing.open(dir.path()).unwrap().check_coverage().unwrap_err().to_string();
    assert!(message.contains('w') && message.contains('9'), "{message}");
    listing.without_item.push((lost.name, vec![3, 0], lost.sizes));
    let fault = listing.fault(dir.path());
    assert!(fault.starts_with("it does not give the file of `w` at [3, 0]"), "{fault}");
}

#[test]
fn overlapping_and_repeated_chunks_are_rejected() {
    let (dir, listing, _) = directory();
    let mut repeated = listing.clone();
    repeated.items.push(item(&mut repeated.clone(), "w").clone());
    assert_eq!(repeated.fault(dir.path()), "it lists `w` at [0, 0] twice");
    let mut overlapping = listing.clone();
    let second = overlapping.items.iter_mut().find(|item| item.offset == Some(vec![3, 0])).unwrap();
    second.offset = Some(vec![2, 0]);
    let message = overlapping.open(dir.path()).unwrap().check_coverage().unwrap_err().to_string();
    assert!(message.contains('w'), "{message}");
}

#[test]
fn per_rank_metadata_files_are_merged() {
    let (dir, listing, _) = directory();
    let expected = listing.open(dir.path()).unwrap();
    fs::remove_file(dir.path().join(METADATA_FILE)).unwrap();
    let write = |rank: usize, listing: &Listing| {
        fs::write(dir.path().join(format!("__{rank}.metadata")), listing.pickle()).unwrap();
    };
    for rank in 0..2 {
        let mut own = listing.clone();
        // Items that are not split are listed by every rank.
        own.items.retain(|item| item.name != "w" || item.file.starts_with(&format!("__{rank}_")));
        write(rank, &own);
    }
    assert!(is_at(dir.path()));
    let found = open(dir.path()).unwrap();
    assert_eq!((&found.tensors, &found.values), (&expected.tensors, &expected.values));
    let mut other = listing.clone();
    other.tensors.insert("w".to_owned(), (TensorType::I32, vec![5, 3]));
    write(1, &other);
    assert!(open(dir.path()).unwrap_err().to_string().contains("`w` has another type or shape"));
    fs::remove_file(dir.path().join("__1.metadata")).unwrap();
    open(dir.path()).unwrap().check_coverage().unwrap_err();
}

#[test]
fn chunks_outside_their_tensor_are_rejected() {
    let (dir, listing, _) = directory();
    for (offset, sizes) in
        [(vec![4, 0], vec![3, 3]), (vec![0], vec![3]), (vec![u64::MAX >> 1, 0], vec![3, 3])]
    {
        let mut listing = listing.clone();
        let w = item(&mut listing, "w");
        (w.offset, w.sizes) = (Some(offset), sizes);
        let fault = listing.fault(dir.path());
        assert!(fault.starts_with("tensor `w` of shape [5, 3] has a chunk at ["), "{fault}");
    }
    let mut huge = listing;
    huge.tensors.insert("w".to_owned(), (TensorType::F32, vec![1 << 40, 1 << 40]));
    assert!(huge.fault(dir.path()).ends_with("has more bytes than can be counted"));
}

#[test]
fn files_outside_directory_are_rejected() {
    let (dir, listing, _) = directory();
    for file in ["../x", "/etc/passwd", "..", "", "a/b", "a\\b"] {
        let mut listing = listing.clone();
        item(&mut listing, "w").file = file.to_owned();
        let fault = listing.fault(dir.path());
        assert!(
            fault.starts_with(&format!("it places `w` at [0, 0] in `{file}`, which is not a plain")),
            "{fault}"
        );
    }
}

#[test]
fn items_outside_their_file_are_rejected() {
    let (dir, listing, _) = directory();
    for (start, len) in [(1 << 30, 10), (0, 1 << 40), (u64::MAX >> 1, 1)] {
        let mut listing = listing.clone();
        let w = item(&mut listing, "w");
        (w.start, w.len) = (start, len);
        let fault = listing.fault(dir.path());
        let expected =
            format!("`w` at [0, 0] should be bytes {start}..{} of it, but it has only ", start + len);
        assert!(fault.starts_with(&expected), "{fault}");
    }
    let mut missing = listing;
    item(&mut missing, "step").file = "__7_0.distcp".to_owned();
    let message = missing.open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("__7_0.distcp: it is missing: it should hold `step`"), "{message}");
}

#[test]
fn items_of_other_tensors_are_rejected() {
    let (dir, mut listing, _) = directory();
    let right = item(&mut listing, "right").clone();
    let left = item(&mut listing, "left");
    (left.start, left.len) = (right.start, right.len);
    let message = listing.fault(dir.path());
    assert!(message.contains("`left` at [0, 0]") && message.contains("is one of U8 [1, 3]"), "{message}");
    let step = item(&mut listing, "step").clone();
    let left = item(&mut listing, "left");
    (left.start, left.len) = (step.start, step.len);
    assert!(listing.fault(dir.path()).contains("something else"));
}

#[test]
fn damaged_item_error_quotes_item_once() {
    let (dir, mut listing, _) = directory();
    let left = item(&mut listing, "left").clone();
    let path = dir.path().join(&left.file);
    let mut bytes = fs::read(&path).unwrap();
    bytes[left.start as usize] ^= 1;
    fs::write(&path, bytes).unwrap();
    let message = listing.open(dir.path()).unwrap_err().to_string();
    assert!(message.contains(": item `left` at [0, 0]: "), "{message}");
}

#[test]
fn unknown_transforms_are_rejected_by_name() {
    let (dir, mut listing, _) = directory();
    item(&mut listing, "w").transforms = Some(vec!["stream.rot13/1"]);
    let message = listing.fault(dir.path());
    assert!(message.contains("rot13") && message.contains("`w` at [0, 0]"), "{message}");
    item(&mut listing, "w").transforms = Some(vec!["stream.zstd/1"]);
    let fault = listing.fault(dir.path());
    assert!(fault.starts_with("`w` at [0, 0] cannot be decompressed: "), "{fault}");
}

#[test]
fn checkpoints_of_other_tools_are_rejected_by_name() {
    let (dir, listing, _) = directory();
    for (root, tool) in [
        (("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"), "Megatron Core"),
        (("bytecheckpoint.checkpointer.meta_type", "Metadata"), "ByteCheckpoint"),
    ] {
        let listing = Listing { root, ..listing.clone() };
        let fault = listing.fault(dir.path());
        assert!(fault.starts_with(&format!("it is a checkpoint of {tool}, ")), "{fault}");
    }
    let megatron = Listing { root_fields: vec!["mcore_data"], ..listing };
    assert!(megatron.fault(dir.path()).starts_with("it is a checkpoint of Megatron Core, "));
}

#[test]
fn code_running_pickle_is_rejected_and_named() {
    let (dir, _, _) = directory();
    fs::write(dir.path().join(METADATA_FILE), b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.").unwrap();
    let message = open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("os.system") && message.contains(METADATA_FILE), "{message}");
}

#[test]
fn bit_flips_around_tensor_data_are_detected() {
    let (dir, mut listing, _) = directory();
    let expected = listing.open(dir.path()).unwrap();
    let left = item(&mut listing, "left").clone();
    let path = dir.path().join(&left.file);
    let bytes = fs::read(&path).unwrap();
    let data = expected.tensors["left"].chunks[0].offset;
    for at in left.start..left.start + left.len {
        if (data..data + 2).contains(&at) {
            continue;
        }
        let mut flipped = bytes.clone();
        flipped[at as usize] ^= 0x10;
        fs::write(&path, flipped).unwrap();
        let Ok(found) = open(dir.path()) else { continue };
        let is_noticed = found.protections.iter().any(|protection| {
            let range = protection.range.start as usize..protection.range.end as usize;
            let bytes = fs::read(found.sources[protection.source].path()).unwrap();
            protection.digest.kind.of(&bytes[range]) != protection.digest
        });
        assert!(is_noticed || found.tensors["left"] == expected.tensors["left"], "byte {at}");
    }
}

#[test]
fn tensors_in_tuple_get_indexed_names() {
    let (dir, mut listing, _) = directory();
    let mut w = PickleWriter::new();
    w.tuple(|w| {
        targets::torch_archive::tensor(w, 0, TensorType::U8, &[2]);
        w.text("x");
    });
    let mut archive = targets::torch_archive::begin("archive", &w.finish());
    let at = targets::torch_archive::storage("archive", &mut archive, 0, 2);
    targets::torch_archive::end("archive", &mut archive);
    let mut bytes = vec![0; archive.len() as usize];
    let mut put = |at: u64, part: &[u8]| bytes[at as usize..at as usize + part.len()].copy_from_slice(part);
    archive.take_literals().iter().for_each(|(at, part)| put(*at, part));
    put(at, &[7, 8]);
    let digest = crate::digest::DigestKind::Crc32.of(&[7, 8]);
    archive.finish([digest]).iter().for_each(|(at, part)| put(*at, part));
    fs::write(dir.path().join("tuple"), &bytes).unwrap();
    let step = item(&mut listing, "step");
    (step.file, step.start, step.len) = ("tuple".to_owned(), 0, bytes.len() as u64);
    let checkpoint = listing.open(dir.path()).unwrap();
    let tensor = &checkpoint.tensors["step.0"];
    assert_eq!((tensor.chunks[0].offset, &tensor.shape[..]), (at, &[2][..]));
    assert_eq!(checkpoint.values["step.1"].value, Value::Str("x".to_owned()));
    assert_eq!(checkpoint.world_size, None);
}
