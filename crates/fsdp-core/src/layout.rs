//! The layout: the position of every element of every parameter on every rank.
//!
//! A unit is a short list of **segments**, one per (trainable or frozen, dtype, row length). A segment is one contiguous
//! buffer of whole rows; its parameters follow each other, each seen as a matrix of rows of that length (of bytes, if they are
//! quantized). Parameters of fewer than two dimensions are appended to the unit's largest segment of their kind, padded to
//! whole rows. Every rank owns `ceil(rows / S)` rows. Padding rows align the start of each parameter to 16 bytes.
//! Padding is zero and stays zero.
//!
//! On an expert axis, a unit of experts is divided into **blocks**, one for each rank of the axis. Blocks are alike: a rank
//! gathers one, and calls it by the parameters of the first. Each is sharded over the ranks that have it.
//!
//! The layout is a pure function of (parameters, units, S, dtype), so any rank and any offline tool can compute the
//! pieces of every rank without communication.

use std::collections::BTreeMap;

use crate::dtype::DType;
use crate::memory::Rows;
use crate::mesh::Group;
use crate::model::{ModelSpec, ParamId, ParamSpec};
use crate::wrap::{Unit, UnitId};

/// Alignment in bytes of the start of every parameter, when its elements have the parameter dtype.
const ALIGNMENT_BYTES: usize = 16;
/// Row length of a segment that holds only parameters without rows: small, to keep padding low, and a multiple of the
/// alignment in every dtype.
const ROWLESS_ROW_LEN: usize = 16;

/// Where a parameter lies in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The parameter.
    pub param: ParamId,
    /// The block of the unit that it belongs to.
    pub block: usize,
    /// First element within the unsharded segment.
    pub offset: usize,
    /// Number of elements that are stored.
    pub len: usize,
    /// The parameter's own row length, of what is stored; 1 if it has fewer than two dimensions.
    pub row_len: usize,
}

/// Index of a segment in its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub usize);

/// One buffer of a unit: the parameters of one row length that are gathered in one dtype, and all trainable or all frozen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Whether its parameters are trained.
    pub trainable: bool,
    /// The dtype in which it is gathered: U8 if its parameters are quantized.
    pub dtype: DType,
    /// Elements of a row.
    pub row_len: usize,
    /// Rows that each rank owns; the unsharded segment has `S` times as many.
    pub rows_per_rank: usize,
    /// Number of ranks that hold a block together, S.
    pub shards: usize,
    /// Number of blocks; the unsharded segment is one of them.
    pub blocks: usize,
    /// The parameters, in the order of blocks and offsets.
    pub params: Vec<Extent>,
}

impl Segment {
    /// Whether its parameters are quantized.
    pub fn is_quantized(&self) -> bool {
        self.dtype == DType::U8
    }

    /// Number of elements of one rank's shard.
    pub fn shard_len(&self) -> usize {
        self.rows_per_rank * self.row_len
    }

    /// Number of elements of the unsharded segment that a rank gathers, including padding.
    pub fn unsharded_len(&self) -> usize {
        self.shard_len() * self.shards
    }

    /// Number of bytes of the unsharded segment, in the dtype in which it is gathered.
    pub fn unsharded_bytes(&self) -> usize {
        self.unsharded_len() * self.dtype.size_bytes()
    }

    /// The pieces of parameters that shard number `shard` holds, in the order of offsets. Neighbors hold different blocks.
    pub fn pieces(&self, shard: usize) -> Vec<Piece> {
        let (block, start) = (shard % self.blocks, shard / self.blocks * self.shard_len());
        let len = self.shard_len();
        let overlaps = |place: &Extent| {
            let from = place.offset.max(start);
            let to = (place.offset + place.len).min(start + len);
            (from < to).then(|| Piece {
                param: place.param,
                offset: from - start,
                len: to - from,
                param_offset: from - place.offset,
                row_len: place.row_len,
            })
        };
        self.params.iter().filter(|place| place.block == block).filter_map(overlaps).collect()
    }

    /// The parameters of the first block, by which all blocks are called.
    pub fn gathered(&self) -> impl Iterator<Item = &Extent> + Clone {
        self.params.iter().filter(|place| place.block == 0)
    }

    /// The ranges (offset, length) of the unsharded segment that belong to no parameter.
    pub fn padding(&self) -> Vec<(usize, usize)> {
        let mut gaps = Vec::new();
        let mut at = 0;
        for place in self.gathered() {
            if place.offset > at {
                gaps.push((at, place.offset - at));
            }
            at = place.offset + place.len;
        }
        if at < self.unsharded_len() {
            gaps.push((at, self.unsharded_len() - at));
        }
        gaps
    }
}

/// A contiguous range of elements of one parameter inside a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The parameter.
    pub param: ParamId,
    /// First element within the shard.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// Index of the first element within the parameter.
    pub param_offset: usize,
    /// Row length of the parameter; 1 if it has fewer than two dimensions. A piece consists of whole rows.
    pub row_len: usize,
}

impl Piece {
    /// Its rows in the shard.
    pub fn rows(&self) -> Rows {
        Rows { offset: self.offset, len: self.len, row_len: self.row_len }
    }
}

/// The segments of one unit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnitLayout {
    /// Name of the unit.
    pub name: String,
    /// Whether this is the root unit.
    pub is_root: bool,
    /// The number of the unit that it was part of before its experts became a unit of their own.
    pub origin: usize,
    /// Number of ranks that hold a block of it together.
    pub shards: usize,
    /// Number of blocks that it is divided into on the expert axis; 1 if it is not.
    pub blocks: usize,
    /// Trainable segments first (so that a trainable segment's number is also its index), each group in the order of
    /// first use.
    pub segments: Vec<Segment>,
}

impl UnitLayout {
    /// Whether the unit gets gradients.
    pub fn is_trainable(&self) -> bool {
        self.segments.iter().any(|segment| segment.trainable)
    }

    /// The segments that get gradients.
    pub fn trainable_segments(&self) -> impl Iterator<Item = &Segment> + Clone {
        self.segments.iter().filter(|segment| segment.trainable)
    }

    /// The ranks that gather it together, and over which its gradient is reduced.
    pub fn group(&self) -> Group {
        if self.blocks > 1 { Group::EXPERT_SHARDS } else { Group::SHARDS }
    }

    /// Unsharded bytes, including padding, divided by the bytes of parameters.
    pub fn padding_factor(&self) -> f64 {
        let unsharded: usize = self.segments.iter().map(Segment::unsharded_bytes).sum();
        let params = |segment: &Segment| {
            segment.gathered().map(|place| place.len * segment.dtype.size_bytes()).sum::<usize>()
        };
        unsharded as f64 / self.segments.iter().map(params).sum::<usize>() as f64
    }
}

/// The positions of all parameters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Number of ranks that hold all shards together.
    pub shards: usize,
    /// The units.
    pub units: Vec<UnitLayout>,
    /// Unit, segment and index in the segment of every parameter.
    places: Vec<Option<(UnitId, SegmentId, usize)>>,
}

impl Layout {
    /// Computes the layout of `units` over `shards` ranks; the alignment depends on `param_dtype`.
    ///
    /// # Panics
    /// When `shards` is zero, or the blocks of a unit do not divide it.
    pub fn new(spec: &ModelSpec, units: &[Unit], shards: usize, param_dtype: DType) -> Self {
        assert!(shards > 0, "a shard axis has at least one rank");
        let units: Vec<UnitLayout> = units
            .iter()
            .map(|unit| {
                assert!(shards.is_multiple_of(unit.blocks), "a shard is of one block");
                let Unit { is_root, origin, blocks, .. } = *unit;
                let name = unit.name.clone();
                let shards = shards / blocks;
                let segments = segments(spec, unit, shards, param_dtype);
                UnitLayout { name, is_root, origin, shards, blocks, segments }
            })
            .collect();
        let places = places(&units, spec.params.len());
        Self { shards, units, places }
    }

    /// Returns the unit, segment and extent of a parameter; `None` if it is in no unit.
    pub fn find(&self, id: ParamId) -> Option<(UnitId, SegmentId, Extent)> {
        let (unit, segment, index) = self.places.get(id.0).copied().flatten()?;
        Some((unit, segment, self.unit(unit).segments[segment.0].params[index]))
    }

    /// Those of a block's parameters that its calls name: all but experts of other blocks than the first.
    pub fn called<'a>(&'a self, params: &'a [ParamId]) -> impl Iterator<Item = ParamId> + Clone + 'a {
        params.iter().copied().filter(|&id| self.find(id).is_none_or(|(.., place)| place.block == 0))
    }

    /// Returns a unit by id.
    pub fn unit(&self, id: UnitId) -> &UnitLayout {
        &self.units[id.0]
    }

    /// The ids of all units.
    pub fn unit_ids(&self) -> impl Iterator<Item = UnitId> + use<> {
        (0..self.units.len()).map(UnitId)
    }
}

fn places(units: &[UnitLayout], params: usize) -> Vec<Option<(UnitId, SegmentId, usize)>> {
    let mut places = vec![None; params];
    for (unit, layout) in units.iter().enumerate() {
        for (segment, held) in layout.segments.iter().enumerate() {
            for (index, place) in held.params.iter().enumerate() {
                places[place.param.0] = Some((UnitId(unit), SegmentId(segment), index));
            }
        }
    }
    places
}

fn segments(spec: &ModelSpec, unit: &Unit, shards: usize, dtype: DType) -> Vec<Segment> {
    let blocks = unit.blocks;
    let block_of: BTreeMap<ParamId, usize> =
        unit.params.iter().enumerate().map(|(index, &id)| (id, index * blocks / unit.params.len())).collect();
    let block_of = &block_of;
    let kind = move |param: &ParamSpec| (param.trainable, param.gathered_dtype(dtype));
    let mut dtypes = vec![dtype, dtype.master(), DType::U8];
    dtypes.dedup();
    [true, false]
        .into_iter()
        .flat_map(|trainable| dtypes.iter().map(move |&dtype| (trainable, dtype)))
        .flat_map(|(trainable, dtype)| {
            let is_of_kind = move |&id: &ParamId| kind(spec.param(id)) == (trainable, dtype);
            let of_kind = unit.params.iter().copied().filter(is_of_kind);
            let (rows, rowless): (Vec<ParamId>, Vec<ParamId>) =
                of_kind.partition(|&id| spec.param(id).stored_row_len().is_some());
            group_rows(spec, &rows, &rowless).into_iter().map(move |(row_len, mut params)| {
                params.sort_by_key(|id| block_of[id]);
                let (rows, params) = extents(spec, row_len, &params, block_of, dtype);
                Segment {
                    trainable,
                    dtype,
                    row_len,
                    rows_per_rank: rows.div_ceil(shards),
                    shards,
                    blocks,
                    params,
                }
            })
        })
        .collect()
}

/// Groups parameters by row length, in the order of first use, and adds those without rows to the largest group.
fn group_rows(spec: &ModelSpec, rows: &[ParamId], rowless: &[ParamId]) -> Vec<(usize, Vec<ParamId>)> {
    let mut groups: Vec<(usize, Vec<ParamId>)> = Vec::new();
    for &id in rows {
        let row_len = spec.param(id).stored_row_len().expect("only parameters with rows are grouped by them");
        match groups.iter_mut().find(|(len, _)| *len == row_len) {
            Some((_, params)) => params.push(id),
            None => groups.push((row_len, vec![id])),
        }
    }
    if rowless.is_empty() {
        return groups;
    }
    let elements = |params: &[ParamId]| params.iter().map(|&id| spec.param(id).stored_len()).sum::<usize>();
    // Of equally large groups the first one, so that the choice is unique.
    let largest = (0..groups.len()).rev().max_by_key(|&index| elements(&groups[index].1));
    match largest {
        Some(index) => groups[index].1.extend(rowless),
        None => groups.push((ROWLESS_ROW_LEN, rowless.to_vec())),
    }
    groups
}

/// Lays parameters out in rows, each block by itself; returns the number of rows of a block.
fn extents(
    spec: &ModelSpec,
    row_len: usize,
    params: &[ParamId],
    block_of: &BTreeMap<ParamId, usize>,
    dtype: DType,
) -> (usize, Vec<Extent>) {
    let (mut row, mut block) = (0, 0);
    let mut extents = Vec::with_capacity(params.len());
    for &id in params {
        let block_before = std::mem::replace(&mut block, block_of[&id]);
        row = if block == block_before { row } else { 0 };
        while !(row * row_len * dtype.size_bytes()).is_multiple_of(ALIGNMENT_BYTES) {
            row += 1;
        }
        let param = spec.param(id);
        let param_row_len = param.stored_row_len().unwrap_or(1);
        let (offset, len) = (row * row_len, param.stored_len());
        extents.push(Extent { param: id, block, offset, len, row_len: param_row_len });
        row += len.div_ceil(row_len);
    }
    (row, extents)
}

#[cfg(test)]
mod tests;
