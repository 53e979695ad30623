//! Locates the elements of each parameter in the flat tensors, by the layout of each stage.
//!
//! Stage 3 cuts each parameter into as many pieces as there are ranks, the last ones shorter or empty, and padded. A
//! rank's pieces of successive parameters follow one another through its groups. Stages 1 and 2 cut each group as a
//! whole: concatenated over the ranks, a group holds one parameter after another.

use std::ops::Range;

use super::parse::{FlatStates, ModelStates};
use crate::{
    checkpoint::{Checkpoint, Chunk, Key, Role, Tensor, element_count},
    error::Fault,
    formats::{local::LocalTensor, merge::chunks_of, optimizer::put_tensor, rank_fault::too_short},
    safetensors::TensorType,
};

/// Flat tensors of one layout: the copies of the weights, or a state of the optimizer.
pub(super) struct Flats<'a> {
    pub(super) ranks: &'a [FlatStates],
    pub(super) model: &'a ModelStates,
    /// By rank and group.
    pub(super) held: Vec<Vec<LocalTensor>>,
}

/// A parameter in flat tensors.
pub(super) struct Located<'a> {
    pub(super) name: &'a str,
    shape: &'a [u64],
    /// The flat group in which it begins.
    pub(super) group: usize,
    /// Its elements: in the groups of each rank in stage 3, otherwise in its group of all ranks.
    range: Range<u64>,
}

impl<'a> Flats<'a> {
    fn are_parameters_cut(&self) -> bool {
        self.ranks[0].stage == 3
    }

    /// Locates all parameters.
    pub(super) fn located(&self) -> Result<Vec<Located<'a>>, Fault> {
        let (first, groups, world) = (&self.held[0], &self.model.param_shapes, self.ranks.len() as u64);
        if self.are_parameters_cut() {
            let group = |start| (1..first.len()).filter(|&end| len_of(&first[..end]) <= start).count();
            return successive(groups.iter().flatten(), world, len_of(first), 0, group);
        }
        if groups.len() != first.len() {
            let place = format!("the number of flat groups, {},", first.len());
            return Err(Fault::unexpected(place, "the number of groups of parameters"));
        }
        let mut located = Vec::new();
        for (group, parameters) in groups.iter().enumerate() {
            let held = len_of(self.held.iter().map(|groups| &groups[group]));
            // Groups are padded to a multiple of twice the number of ranks.
            located.extend(successive(parameters.iter(), 1, held, 2 * world - 1, |_| group)?);
        }
        Ok(located)
    }

    /// Adds all parameters, under paths made of their names.
    pub(super) fn put(
        &self,
        role: Role,
        path: impl Fn(&str) -> Vec<Key>,
        into: &mut Checkpoint,
    ) -> Result<(), Fault> {
        let dtype = self.held[0].first().map_or(TensorType::F32, |flat| flat.dtype);
        for Located { name, shape, group, range } in self.located()? {
            let chunks = if self.are_parameters_cut() {
                let pieces: Vec<LocalTensor> =
                    self.held.iter().flat_map(|groups| runs(groups, &range)).collect();
                chunks_of(&pieces, 0..element_count(shape).unwrap_or(0))
            } else {
                chunks_of(self.held.iter().map(|groups| &groups[group]), range)
            };
            put_tensor(into, Tensor { path: path(name), role, dtype, shape: shape.to_vec(), chunks })?;
        }
        Ok(())
    }
}

/// Locates parameters that follow one another, each cut into so many equal pieces. At most `padding` elements may be left
/// over.
fn successive<'a>(
    parameters: impl Iterator<Item = &'a (String, Vec<u64>)>,
    pieces: u64,
    held: u64,
    padding: u64,
    group: impl Fn(u64) -> usize,
) -> Result<Vec<Located<'a>>, Fault> {
    let mut located = Vec::new();
    let mut start = 0u64;
    for (name, shape) in parameters {
        let len = element_count(shape);
        let len = len.ok_or_else(|| Fault::unexpected(format!("the size of `{name}`"), "less than 2^64"))?;
        let end = start.saturating_add(len.div_ceil(pieces));
        if end > held {
            return Err(too_short(name, end, held));
        }
        located.push(Located { name, shape, group: group(start), range: start..end });
        start = end;
    }
    if held - start > padding {
        let what = format!("the last {} elements of its flat groups", held - start);
        return Err(Fault::unexpected(what, "used by parameters; names and weights do not belong together"));
    }
    Ok(located)
}

/// The runs of a rank's flat tensors that make up a range of their sequence.
fn runs(flats: &[LocalTensor], range: &Range<u64>) -> Vec<LocalTensor> {
    let run = |chunk: Chunk| LocalTensor {
        shape: vec![chunk.region.len().expect("a run of a file can be counted")],
        source: chunk.source,
        offset: chunk.offset,
        ..flats[0].clone()
    };
    chunks_of(flats, range.clone()).into_iter().map(run).collect()
}

fn len_of<'a>(flats: impl IntoIterator<Item = &'a LocalTensor>) -> u64 {
    flats.into_iter().fold(0, |len, flat| len.saturating_add(flat.len()))
}
