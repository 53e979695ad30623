//! The files of ranks: sequences of items, each of which is an archive.

use super::super::{OutputTensor, torch_archive};
use crate::{
    checkpoint::Value,
    digest::{Digest, DigestKind},
    pickle::writer::PickleWriter,
    transfer::{OutputPlan, PlannedFile, PlannedRun, Tail},
    zip::writer::{ALIGNMENT, Archive},
};

/// The root folder of archives that torch saves to a stream.
const ROOT: &str = "archive";

/// Location of an item.
pub(super) struct Item {
    pub(super) rank: usize,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// A rank's file while items are added to it.
pub(super) struct RankFile {
    rank: usize,
    file: PlannedFile,
    open: Vec<OpenArchive>,
}

/// An archive whose last bytes are not known yet.
struct OpenArchive {
    offset: u64,
    archive: Archive,
    /// Whether it has a place in the plan, and therefore a digest; empty tensors have none.
    has_place: bool,
}

impl RankFile {
    pub(super) fn new(rank: usize) -> RankFile {
        let file = PlannedFile { name: super::metadata::file_name(rank), ..PlannedFile::default() };
        RankFile { rank, file, open: Vec::new() }
    }

    /// Adds an item that contains a value.
    pub(super) fn add_value(&mut self, value: &Value) -> Item {
        let mut pickle = PickleWriter::new();
        pickle.value(value);
        let mut archive = torch_archive::begin(ROOT, &pickle.finish());
        torch_archive::end(ROOT, &mut archive);
        self.add(archive, false)
    }

    /// Adds an item that contains rows of a tensor, or all of a 0-d tensor.
    pub(super) fn add_rows(&mut self, tensor: &OutputTensor, first_row: u64, row_count: u64) -> Item {
        let mut shape = tensor.shape.clone();
        if let Some(rows) = shape.first_mut() {
            *rows = row_count;
        }
        let mut pickle = PickleWriter::new();
        torch_archive::tensor(&mut pickle, 0, tensor.dtype, &shape);
        let mut archive = torch_archive::begin(ROOT, &pickle.finish());
        let len_elems: u64 = shape.iter().product();
        let len = len_elems * tensor.dtype.size_bytes() as u64;
        let data = torch_archive::storage(ROOT, &mut archive, 0, len);
        torch_archive::end(ROOT, &mut archive);

        let item = self.add(archive, len > 0);
        if len > 0 {
            let first = first_row * (len_elems / row_count);
            self.file.places.push(PlannedRun {
                offset: item.offset + data,
                tensor: tensor.source.clone(),
                elements: first..first + len_elems,
                dtype: tensor.dtype,
                digest: Some(DigestKind::Crc32),
            });
        }
        item
    }

    fn add(&mut self, mut archive: Archive, has_place: bool) -> Item {
        let offset = self.file.len.next_multiple_of(ALIGNMENT);
        let len = archive.len();
        for (at, bytes) in archive.take_literals() {
            self.file.literals.push((offset + at, bytes));
        }
        self.file.len = offset + len;
        self.open.push(OpenArchive { offset, archive, has_place });
        Item { rank: self.rank, offset, len }
    }
}

/// Converts the files to a plan; `last` is a whole file (name and bytes) that is written after everything else.
pub(super) fn output_plan(rank_files: Vec<RankFile>, last: (String, Vec<u8>)) -> OutputPlan {
    let (mut files, mut open) = (Vec::new(), Vec::new());
    for rank_file in rank_files {
        files.push(rank_file.file);
        open.push(rank_file.open);
    }
    let tail = move |digests: &[Vec<Option<Digest>>]| {
        let mut patches = Vec::new();
        for (index, (archives, digests)) in open.into_iter().zip(digests).enumerate() {
            let mut digests = digests.iter().map(|digest| digest.expect("each place asked for a CRC-32"));
            for OpenArchive { offset, archive, has_place } in archives {
                let parts = archive.finish(digests.by_ref().take(usize::from(has_place)));
                patches.extend(parts.into_iter().map(|(at, bytes)| (index, offset + at, bytes)));
            }
        }
        Ok(Tail { patches, files: vec![last] })
    };
    OutputPlan { files, tail: Box::new(tail) }
}
