//! Reads micro-batches from a safetensors file that the other program wrote.

use std::ops::Range;
use std::path::Path;

use fsdp_ckpt::safetensors::{SafetensorsReader, TensorType};

use super::MicroBatch;
use super::shift::{self, Labelled};
use crate::error::TrainError;

/// The label of positions that do not count, in PyTorch.
pub(super) const IGNORED_LABEL: i64 = -100;

/// The most tokens of a step: some thousand times those of one that takes a host minutes.
const TOKENS_MAX: usize = 1 << 28;

/// Reads the micro-batches `m0`, `m1`, .. of a file: `.input_ids` and `.labels` [rows, tokens], and where rows have several
/// documents or padding, `.position_ids` and `.attention_mask` of the same shape. `shifted` says that the label of a
/// position is the token to predict there, and not, as in transformers, the token there. `limits` are the size of the model's
/// vocabulary, and the most positions that it has, if it has a table of them.
///
/// # Errors
/// [`TrainError::Input`], naming the tensor; [`TrainError::Checkpoint`] for a file that cannot be read.
pub fn read_batches(
    path: &Path,
    shifted: bool,
    limits: (usize, Option<usize>),
) -> Result<Vec<MicroBatch>, TrainError> {
    let file = File { reader: SafetensorsReader::open(path)?, path };
    let has = |name: &str| file.reader.header().entry(name).is_some();
    let count = (0..).take_while(|index| has(&format!("m{index}.input_ids"))).count();
    if count == 0 {
        return Err(file.fault("m0.input_ids", "it is missing: docs/auditing.md shows how to write the file"));
    }
    file.expect_known(count)?;
    let read = (0..count).map(|index| file.micro_batch(index, shifted, limits));
    let (batches, labels): (Vec<MicroBatch>, Vec<Labelled>) =
        read.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    if batches.iter().all(|batch| batch.counted() == 0) {
        let what = match shifted {
            true => "no position of any micro-batch counts: all labels are -100",
            false => {
                "no position of any micro-batch counts: all labels are -100, but for the first of each row, which nothing \
                 predicts"
            }
        };
        return Err(file.fault("m0.labels", what));
    }
    match shift::fault(&labels, shifted) {
        Some(what) => Err(file.fault("m0.labels", what)),
        None => Ok(batches),
    }
}

struct File<'a> {
    reader: SafetensorsReader,
    path: &'a Path,
}

impl File<'_> {
    fn fault(&self, tensor: &str, what: &str) -> TrainError {
        TrainError::Input(format!("{}: tensor {tensor}: {what}", self.path.display()))
    }

    /// Refuses tensors that belong to none of the first `count` micro-batches.
    fn expect_known(&self, count: usize) -> Result<(), TrainError> {
        let known = ["input_ids", "labels", "position_ids", "attention_mask"];
        for name in self.reader.names() {
            let part = name.strip_prefix('m').and_then(|name| name.split_once('.'));
            let part = part.filter(|(_, part)| known.contains(part));
            let index = part.and_then(|(index, _)| index.parse::<usize>().ok());
            // Only `m1` and not `m01` is the second one.
            match index.filter(|index| name.starts_with(&format!("m{index}."))) {
                Some(index) if index < count => {}
                Some(index) => {
                    let what = format!(
                        "it is missing, although there is a micro-batch m{index}: they are m0, m1 and so on"
                    );
                    return Err(self.fault(&format!("m{count}.input_ids"), &what));
                }
                None => {
                    let what = format!("it does not belong here: micro-batches have {}", known.join(", "));
                    return Err(self.fault(name, &what));
                }
            }
        }
        Ok(())
    }

    /// Reads a micro-batch, and how its labels lie.
    fn micro_batch(
        &self,
        index: usize,
        shifted: bool,
        (vocab, positions_max): (usize, Option<usize>),
    ) -> Result<(MicroBatch, Labelled), TrainError> {
        let name = |part: &str| format!("m{index}.{part}");
        let (ids, shape) = self.integers(&name("input_ids"), None)?;
        let seq = shape[1];
        self.expect_positions(&name("input_ids"), seq, positions_max)?;
        let optional = |part: &str| -> Result<Option<Vec<i64>>, TrainError> {
            let is_there = self.reader.header().entry(&name(part)).is_some();
            let read = is_there.then(|| self.integers(&name(part), Some(shape))).transpose()?;
            Ok(read.map(|(values, _)| values))
        };
        let token = |part: &str, value: i64| {
            u32::try_from(value).ok().filter(|&id| (id as usize) < vocab).ok_or_else(|| {
                let ignored = if part == "labels" { ", nor -100, which does not count" } else { "" };
                self.fault(
                    &name(part),
                    &format!("{value} is not among the {vocab} tokens of the model{ignored}"),
                )
            })
        };
        let ids = ids.into_iter().map(|id| token("input_ids", id)).collect::<Result<Vec<_>, _>>()?;
        let Some(labels) = optional("labels")? else {
            return Err(self.fault(
                &name("labels"),
                "it is missing; labels may be the input_ids, with -100 where nothing counts",
            ));
        };
        let label = |label: i64| match label {
            IGNORED_LABEL => Ok(None),
            label => token("labels", label).map(Some),
        };
        let labels = labels.into_iter().map(label).collect::<Result<Vec<_>, _>>()?;
        let next = |at: usize| if (at + 1).is_multiple_of(seq) { None } else { labels[at + 1] };
        let targets = if shifted { labels.clone() } else { (0..ids.len()).map(next).collect() };
        let mask = optional("attention_mask")?;
        let is_text = match &mask {
            Some(mask) => self.text(&name("attention_mask"), mask, &targets, seq)?,
            None => text_of(&ids, &labels, seq),
        };
        let positions = optional("position_ids")?;
        let runs_on = positions.is_none();
        let is_predicted_by_padding = |at: &usize| targets[*at].is_some() && !is_text[*at] && is_text[at + 1];
        if mask.is_some()
            && let Some(at) = (0..ids.len() - 1).find(is_predicted_by_padding)
        {
            let what = format!(
                "row {}: the first token of text counts, and the padding in front of it would predict it: give it the label -100",
                at / seq
            );
            return Err(self.fault(&name("labels"), &what));
        }
        let positions = match positions {
            // transformers gives padding the position 1, or any other: only those of text count.
            Some(positions) if mask.is_some() && counts_text(&positions, &is_text, seq) => {
                after_padding(&is_text, seq)
            }
            Some(positions) => self.documents(&name("position_ids"), &positions, seq)?,
            None if mask.is_some() => after_padding(&is_text, seq),
            None => None,
        };
        let labelled = Labelled::of(&ids, &labels, seq);
        let runs_on = runs_on && positions.is_some();
        Ok((MicroBatch { ids, targets, seq, runs_on, positions, is_text }, labelled))
    }

    /// Refuses rows that are longer than the positions of the model.
    fn expect_positions(&self, name: &str, seq: usize, most: Option<usize>) -> Result<(), TrainError> {
        let fault = |most| format!("its rows have {seq} tokens, more than the {most} positions of the model");
        most.filter(|most| seq > *most).map_or(Ok(()), |most| Err(self.fault(name, &fault(most))))
    }

    /// Which tokens are text, by a mask.
    fn text(
        &self,
        name: &str,
        mask: &[i64],
        targets: &[Option<u32>],
        seq: usize,
    ) -> Result<Vec<bool>, TrainError> {
        if let Some(value) = mask.iter().find(|value| !matches!(value, 0 | 1)) {
            let what = format!(
                "it has {value}, expected 1 for text and 0 for padding; documents that share a row are told by position_ids"
            );
            return Err(self.fault(name, &what));
        }
        let is_text: Vec<bool> = mask.iter().map(|value| *value == 1).collect();
        if let Some(row) = is_text.chunks(seq).position(has_holes) {
            let what =
                format!("row {row} has padding between text: only padding before or after it can be judged");
            return Err(self.fault(name, &what));
        }
        let mut rows = is_text.chunks(seq).zip(targets.chunks(seq));
        let is_lost = |(text, targets): (&[bool], &[Option<u32>])| {
            !text.contains(&true) && targets.iter().any(Option::is_some)
        };
        match rows.position(is_lost) {
            Some(row) => {
                let what =
                    format!("row {row} has labels that count, but no text: 1 is text and 0 is padding");
                Err(self.fault(name, &what))
            }
            None => Ok(is_text),
        }
    }

    /// The positions of rows with several documents; `None` if each row is one.
    fn documents(&self, name: &str, positions: &[i64], seq: usize) -> Result<Option<Vec<u32>>, TrainError> {
        let is_plain = positions.iter().enumerate().all(|(at, &position)| position == (at % seq) as i64);
        if is_plain {
            return Ok(None);
        }
        let mut documents = Vec::with_capacity(positions.len());
        for (at, &position) in positions.iter().enumerate() {
            let expected = if at % seq == 0 { 0 } else { documents[at - 1] + 1 };
            if position != 0 && position != i64::from(expected) {
                let what = format!(
                    "row {}, position {}: {position} neither begins a document (0) nor continues it ({expected})",
                    at / seq,
                    at % seq
                );
                return Err(self.fault(name, &what));
            }
            documents.push(if position == 0 { 0 } else { expected });
        }
        Ok(Some(documents))
    }

    /// Reads a matrix of integers.
    fn integers(
        &self,
        name: &str,
        expected: Option<[usize; 2]>,
    ) -> Result<(Vec<i64>, [usize; 2]), TrainError> {
        let entry = self.reader.entry(name)?;
        let shape = <[usize; 2]>::try_from(entry.shape()).ok().filter(|[rows, seq]| rows * seq > 0);
        let Some(shape) = shape.filter(|shape| expected.is_none_or(|expected| expected == *shape)) else {
            let wanted = expected.map_or("[rows, tokens]".to_owned(), |shape| format!("{shape:?}"));
            return Err(self.fault(name, &format!("its shape is {:?}, expected {wanted}", entry.shape())));
        };
        if shape[0].saturating_mul(shape[1]) > TOKENS_MAX {
            return Err(self.fault(name, &format!("it has more than {TOKENS_MAX} tokens")));
        }
        let dtype = entry.dtype();
        let (known, expected) = match name.ends_with("attention_mask") {
            true => (
                &[TensorType::I64, TensorType::I32, TensorType::U8, TensorType::Bool][..],
                "I64, I32, U8 or BOOL",
            ),
            false => (&[TensorType::I64, TensorType::I32, TensorType::U8][..], "I64, I32 or U8"),
        };
        if !known.contains(&dtype) {
            return Err(self.fault(name, &format!("its dtype is {}, expected {expected}", dtype.name())));
        }
        let mut bytes = vec![0; shape[0] * shape[1] * dtype.size_bytes()];
        self.reader.read_rows(name, Range { start: 0, end: shape[0] }, &mut bytes)?;
        let values = bytes.chunks_exact(dtype.size_bytes()).map(|bytes| match *bytes {
            [byte] => i64::from(byte),
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            _ => i64::from_le_bytes(bytes.try_into().expect("I64 has eight bytes")),
        });
        Ok((values.collect(), shape))
    }
}

/// Whether the positions of text count from 0 in each row.
fn counts_text(positions: &[i64], is_text: &[bool], seq: usize) -> bool {
    let counts = |(positions, is_text): (&[i64], &[bool])| {
        let text = positions.iter().zip(is_text).filter(|(_, text)| **text);
        text.enumerate().all(|(expected, (position, _))| *position == expected as i64)
    };
    positions.chunks(seq).zip(is_text.chunks(seq)).all(counts)
}

/// Whether padding is between text.
fn has_holes(row: &[bool]) -> bool {
    let text = row.iter().skip_while(|text| !**text);
    text.skip_while(|text| **text).any(|text| *text)
}

/// Without a mask: the same token again and again at the end of a row, not counted, is padding.
fn text_of(ids: &[u32], labels: &[Option<u32>], seq: usize) -> Vec<bool> {
    let row = |(ids, labels): (&[u32], &[Option<u32>])| {
        let last = *ids.last().expect("rows have tokens");
        let padding =
            ids.iter().zip(labels).rev().take_while(|&(&id, label)| id == last && label.is_none()).count();
        let text = if padding > 1 { seq - padding } else { seq };
        (0..seq).map(move |at| at < text).collect::<Vec<_>>()
    };
    ids.chunks(seq).zip(labels.chunks(seq)).flat_map(row).collect()
}

/// Padding in front of text is a document of its own, for nothing attends to it; padding after it needs nothing, because
/// attention is causal.
fn after_padding(is_text: &[bool], seq: usize) -> Option<Vec<u32>> {
    let padded = |row: &[bool]| row.iter().position(|&text| text).unwrap_or(0);
    if is_text.chunks(seq).all(|row| padded(row) == 0) {
        return None;
    }
    let row = |row: &[bool]| {
        let first = padded(row);
        (0..seq).map(move |at| (if at < first { at } else { at - first }) as u32).collect::<Vec<_>>()
    };
    Some(is_text.chunks(seq).flat_map(row).collect())
}
