//! Compares two checkpoints of any formats, tensor by tensor, in pieces.
//!
//! Tensors are matched by name. Tensors of the same dtype are compared bit by bit; F64, F32, BF16 and F16 tensors are
//! also compared by value, even across dtypes. A NaN equals only a NaN. Compressed items are first decoded to a
//! temporary file (in the system's temporary directory), because both sides must be read in the same order.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Mutex,
};

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::{
    checkpoint::Checkpoint,
    error::Error,
    file_io::Files,
    floats::{self, OutOfRange},
    lock::{lock, unlocked},
    safetensors::TensorType,
    transfer::{Options, PieceSizes, Pieces, Reading, SourceFiles, TensorReader, in_threads, scratch_bytes},
};

/// The permitted difference of values: `|a - b| <= atol + rtol * |b|`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// Absolute tolerance.
    pub atol: f64,
    /// Tolerance relative to the second checkpoint's value.
    pub rtol: f64,
}

/// The result of comparing one tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// Same dtype, shape and bits.
    EqualBits,
    /// Same values, but another dtype or other bits (`-0`, NaN).
    EqualValues {
        /// Dtypes in the first and second checkpoint.
        dtypes: [TensorType; 2],
    },
    /// Different values, all within the tolerance.
    WithinTolerance(Deviation),
    /// Some values differ by more than the tolerance.
    Differs(Deviation),
    /// Different bits, in a dtype that has no distance.
    BitsDiffer {
        /// Number of elements that differ.
        differing: u64,
        /// Index of the first such element, in C order.
        at: u64,
    },
    /// Different dtypes, at least one of which is not F64, F32, BF16 or F16.
    TypesDiffer {
        /// Dtypes in the first and second checkpoint.
        dtypes: [TensorType; 2],
    },
    /// Different shapes.
    ShapesDiffer {
        /// Shapes in the first and second checkpoint.
        shapes: [Vec<u64>; 2],
    },
    /// Only the first checkpoint has the tensor.
    OnlyInFirst,
    /// Only the second checkpoint has the tensor.
    OnlyInSecond,
}

/// The difference between tensors of F64, F32, BF16 or F16.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Deviation {
    /// Dtypes in the first and second checkpoint.
    pub dtypes: [TensorType; 2],
    /// Number of elements whose values differ.
    pub differing: u64,
    /// Number of elements that differ by more than the tolerance.
    pub beyond_tolerance: u64,
    /// The largest distance; infinite if one value is NaN or infinite and the other is not.
    #[serde(serialize_with = "number")]
    pub largest: f64,
    /// Index of the element with the largest distance, in C order.
    pub at: u64,
    /// The two values of that element.
    #[serde(serialize_with = "numbers")]
    pub values: [f64; 2],
}

/// A number, or text for values that JSON numbers cannot represent.
fn json(value: f64) -> Value {
    if value.is_finite() { value.into() } else { format!("{value:?}").into() }
}

fn number<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    json(*value).serialize(to)
}

fn numbers<S: Serializer>(values: &[f64; 2], to: S) -> Result<S::Ok, S::Error> {
    values.map(json).serialize(to)
}

impl Outcome {
    /// Whether the outcome counts as equal.
    pub fn is_equal(&self) -> bool {
        matches!(self, Outcome::EqualBits | Outcome::EqualValues { .. } | Outcome::WithinTolerance(_))
    }
}

/// The result of comparing two checkpoints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Diff {
    /// The outcome for every tensor of either checkpoint, by name.
    pub tensors: BTreeMap<String, Outcome>,
    /// Names of values that exist in both checkpoints and differ.
    pub values: Vec<String>,
}

impl Diff {
    /// Whether nothing differs. Values that only one checkpoint has do not count, because not every format can
    /// represent them.
    pub fn is_equal(&self) -> bool {
        self.values.is_empty() && self.tensors.values().all(Outcome::is_equal)
    }
}

/// Compares all tensors.
///
/// # Errors
/// If neither checkpoint has a tensor, a tensor is incomplete or cannot be read, a checksum does not match, or the
/// caller cancels.
pub fn diff(
    first: &Checkpoint,
    second: &Checkpoint,
    tolerance: Tolerance,
    options: &Options,
) -> Result<Diff, Error> {
    if first.tensors.is_empty() && second.tensors.is_empty() {
        let reason = format!("neither it nor {} has tensors to compare", second.path.display());
        return Err(Error::bad_request(&first.path, reason));
    }
    let mut result = Diff { tensors: BTreeMap::new(), values: values(first, second) };
    let names: BTreeSet<&String> = first.tensors.keys().chain(second.tensors.keys()).collect();
    let mut pairs = Vec::new();
    for name in names {
        match (first.tensors.get_key_value(name), second.tensors.get_key_value(name)) {
            (Some((_, a)), Some((_, b))) => match unlike(a, b) {
                Some(outcome) => drop(result.tensors.insert(name.clone(), outcome)),
                None => {
                    a.check_coverage(&first.sources)?;
                    b.check_coverage(&second.sources)?;
                    pairs.push([TensorReader::new(name, a), TensorReader::new(name, b)]);
                }
            },
            (found, _) => {
                let outcome = if found.is_some() { Outcome::OnlyInFirst } else { Outcome::OnlyInSecond };
                result.tensors.insert(name.clone(), outcome);
            }
        }
    }
    let sides = [side(first, &pairs, 0, options)?, side(second, &pairs, 1, options)?];
    let found = compare(&pairs, &sides, tolerance, options)?;
    for side in &sides {
        side.complete_checks(options)?;
        side.checks.verify()?;
    }
    for (pair, found) in pairs.iter().zip(found) {
        result.tensors.insert(pair[0].name.to_owned(), found.outcome(pair));
    }
    Ok(result)
}

/// Compares two tensors of one checkpoint exactly.
pub(crate) fn within(checkpoint: &Checkpoint, names: [&str; 2], options: &Options) -> Result<Outcome, Error> {
    let [a, b] = names.map(|name| &checkpoint.tensors[name]);
    if let Some(outcome) = unlike(a, b) {
        return Ok(outcome);
    }
    let pairs = [[TensorReader::new(names[0], a), TensorReader::new(names[1], b)]];
    let sides = [side(checkpoint, &pairs, 0, options)?, side(checkpoint, &pairs, 1, options)?];
    let found = compare(&pairs, &sides, Tolerance::default(), options)?.pop();
    Ok(found.expect("one pair was compared").outcome(&pairs[0]))
}

/// Names of values that exist in both checkpoints and differ.
fn values(first: &Checkpoint, second: &Checkpoint) -> Vec<String> {
    let differs =
        |name: &&String| second.values.get(*name).is_some_and(|b| b.value != first.values[*name].value);
    first.values.keys().filter(differs).cloned().collect()
}

/// Returns the outcome for tensors that cannot be compared element by element.
fn unlike(a: &crate::checkpoint::Tensor, b: &crate::checkpoint::Tensor) -> Option<Outcome> {
    if a.shape != b.shape {
        return Some(Outcome::ShapesDiffer { shapes: [a.shape.clone(), b.shape.clone()] });
    }
    let is_comparable = a.dtype == b.dtype || (a.dtype.is_convertible() && b.dtype.is_convertible());
    (!is_comparable).then_some(Outcome::TypesDiffer { dtypes: [a.dtype, b.dtype] })
}

/// Makes the tensors of one checkpoint readable in any order.
fn side<'a>(
    checkpoint: &'a Checkpoint,
    pairs: &[[TensorReader; 2]],
    side: usize,
    options: &Options,
) -> Result<SourceFiles<'a>, Error> {
    let mut sources = SourceFiles::new(&Files::anywhere(), checkpoint);
    let is_zstd = |source: usize| checkpoint.sources[source].is_compressed();
    sources.spool_where(&std::env::temp_dir(), pairs.iter().map(|pair| &pair[side]), is_zstd, options)?;
    Ok(sources)
}

/// Differences found so far in one tensor.
#[derive(Clone, Debug, Default)]
struct Found {
    /// Number of elements whose bits differ.
    bits: u64,
    first: Option<u64>,
    /// Number of elements whose values differ.
    values: u64,
    beyond: u64,
    largest: f64,
    at: u64,
    pair: [f64; 2],
}

impl Found {
    fn outcome(self, pair: &[TensorReader; 2]) -> Outcome {
        let dtypes = [pair[0].tensor.dtype, pair[1].tensor.dtype];
        let Found { bits, first, values, beyond, largest, at, pair } = self;
        let deviation =
            Deviation { dtypes, differing: values, beyond_tolerance: beyond, largest, at, values: pair };
        match first {
            None if dtypes[0] == dtypes[1] => Outcome::EqualBits,
            Some(first) if !dtypes[0].is_convertible() => Outcome::BitsDiffer { differing: bits, at: first },
            _ if values == 0 => Outcome::EqualValues { dtypes },
            _ if beyond == 0 => Outcome::WithinTolerance(deviation),
            _ => Outcome::Differs(deviation),
        }
    }

    fn add(&mut self, other: Found) {
        self.bits += other.bits;
        self.first = self.first.into_iter().chain(other.first).min();
        self.values += other.values;
        self.beyond += other.beyond;
        // Among elements of equal distance, keep the first, independent of the order of the pieces.
        let is_farther =
            other.largest > self.largest || (other.largest == self.largest && other.at < self.at);
        if other.values > 0 && (self.values == other.values || is_farther) {
            (self.largest, self.at, self.pair) = (other.largest, other.at, other.pair);
        }
    }
}

#[derive(Default)]
struct Buffers {
    bytes: [Vec<u8>; 2],
    values: [Vec<u8>; 2],
    scratch: Vec<u8>,
}

fn compare(
    pairs: &[[TensorReader; 2]],
    sides: &[SourceFiles; 2],
    tolerance: Tolerance,
    options: &Options,
) -> Result<Vec<Found>, Error> {
    let sizes = PieceSizes::of(options);
    let bytes_of = |pair: &[TensorReader; 2]| pair[0].tensor.len_bytes() + pair[1].tensor.len_bytes();
    options.progress.begin(pairs.iter().map(bytes_of).sum());
    let found: Vec<Mutex<Found>> = pairs.iter().map(|_| Mutex::default()).collect();
    let pieces = Pieces::new(pairs.iter().map(|pair| {
        let element = pair[0].size().max(pair[1].size());
        let is_large = pair.iter().any(TensorReader::wants_large_pieces);
        // Five buffers share the memory that three use in a transfer; converted values have 8 bytes each.
        let bytes = if is_large { sizes.large / 8 } else { sizes.usual / 4 };
        (0..pair[0].tensor.len(), (bytes / element).max(1) as u64)
    }));
    in_threads(options, |buffers: &mut Buffers| {
        let Some((number, elements)) = pieces.next() else { return Ok(false) };
        let bytes =
            (elements.end - elements.start) * (pairs[number][0].size() + pairs[number][1].size()) as u64;
        let part = compare_piece(&pairs[number], sides, elements, tolerance, sizes, buffers)?;
        lock(&found[number]).add(part);
        options.progress.advance(bytes);
        Ok(true)
    })?;
    Ok(found.into_iter().map(unlocked).collect())
}

fn compare_piece(
    pair: &[TensorReader; 2],
    sides: &[SourceFiles; 2],
    elements: Range<u64>,
    tolerance: Tolerance,
    sizes: PieceSizes,
    buffers: &mut Buffers,
) -> Result<Found, Error> {
    let count = (elements.end - elements.start) as usize;
    for (side, reader) in pair.iter().enumerate() {
        let bytes = &mut buffers.bytes[side];
        bytes.resize(count * reader.size(), 0);
        let (scratch, scratch_max) = (&mut buffers.scratch, scratch_bytes(sizes, reader));
        let mut reading = Reading { reader, sources: &sides[side], scratch, scratch_max };
        reading.read(elements.clone(), bytes)?;
    }
    let dtypes = [pair[0].tensor.dtype, pair[1].tensor.dtype];
    let mut found = Found::default();
    if dtypes[0] == dtypes[1] {
        if buffers.bytes[0] == buffers.bytes[1] {
            return Ok(found);
        }
        let size = pair[0].size();
        let both = buffers.bytes[0].chunks_exact(size).zip(buffers.bytes[1].chunks_exact(size));
        for (index, _) in both.enumerate().filter(|(_, (a, b))| a != b) {
            found.bits += 1;
            found.first.get_or_insert(elements.start + index as u64);
        }
    }
    if dtypes[0].is_convertible() {
        for ((bytes, values), dtype) in buffers.bytes.iter().zip(&mut buffers.values).zip(dtypes) {
            values.resize(count * 8, 0);
            floats::between(dtype, TensorType::F64, bytes, values)
                .unwrap_or_else(|OutOfRange { .. }| unreachable!("every float fits in 64 bits"));
        }
        let [a, b] = &buffers.values;
        let both = a.as_chunks().0.iter().zip(b.as_chunks().0);
        for (index, (&a, &b)) in both.enumerate() {
            found.note(
                elements.start + index as u64,
                f64::from_le_bytes(a),
                f64::from_le_bytes(b),
                tolerance,
            );
        }
    }
    Ok(found)
}

impl Found {
    fn note(&mut self, at: u64, a: f64, b: f64, tolerance: Tolerance) {
        if a == b || (a.is_nan() && b.is_nan()) {
            return;
        }
        let distance = (a - b).abs();
        let distance = if distance.is_nan() { f64::INFINITY } else { distance };
        let is_within = distance.is_finite() && distance <= tolerance.atol + tolerance.rtol * b.abs();
        self.values += 1;
        self.beyond += u64::from(!is_within);
        if self.values == 1 || distance > self.largest {
            (self.largest, self.at, self.pair) = (distance, at, [a, b]);
        }
    }
}

#[cfg(test)]
mod tests;
