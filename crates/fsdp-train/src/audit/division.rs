//! Which micro-batches of a file belong to which of several steps.

use std::path::Path;

use fsdp_ckpt::safetensors::SafetensorsReader;

use super::MicroBatch;
use crate::error::TrainError;

/// Divides the micro-batches of a file among steps. Those of each rank are together, as the metadata `ranks` says, and in the
/// order of the steps.
///
/// # Errors
/// [`TrainError::Input`] if `ranks` is not a number, or they cannot be divided; [`TrainError::Checkpoint`] for a file that
/// cannot be read.
pub fn by_step(
    path: &Path,
    batches: Vec<MicroBatch>,
    steps: usize,
) -> Result<Vec<Vec<MicroBatch>>, TrainError> {
    let reader = SafetensorsReader::open(path)?;
    let said = reader.header().metadata().and_then(|metadata| metadata.get("ranks"));
    let number = |text: &String| match text.parse::<usize>() {
        Ok(ranks) if ranks > 0 => Ok(ranks),
        _ => Err(TrainError::Input(format!(
            "{}: its metadata has ranks = {text:?}, expected their number, such as \"2\"",
            path.display()
        ))),
    };
    let (count, ranks) = (batches.len(), said.map_or(Ok(1), number)?);
    if steps == 1 {
        return Ok(vec![batches]);
    }
    let parts = ranks.checked_mul(steps);
    if count == 0 || !parts.is_some_and(|parts| count.is_multiple_of(parts)) {
        return Err(TrainError::Input(format!(
            "{}: {count} micro-batches of {ranks} rank(s) are not those of {steps} steps: each rank has to have the same number \
             in each step, and its steps follow each other",
            path.display()
        )));
    }
    Ok(divided(batches, steps, ranks))
}

/// Each rank has its steps one after the other.
fn divided<T>(items: Vec<T>, steps: usize, ranks: usize) -> Vec<Vec<T>> {
    let of_step = items.len() / (ranks * steps);
    let mut divided: Vec<Vec<T>> = (0..steps).map(|_| Vec::new()).collect();
    for (index, item) in items.into_iter().enumerate() {
        divided[index / of_step % steps].push(item);
    }
    divided
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_has_its_micro_batches_of_every_rank() {
        // Rank, step and micro-batch.
        let of_rank = |rank| (0..3).flat_map(move |step| (0..2).map(move |micro| (rank, step, micro)));
        let divided = divided((0..2).flat_map(of_rank).collect(), 3, 2);
        for (step, batches) in divided.iter().enumerate() {
            assert_eq!(*batches, [(0, step, 0), (0, step, 1), (1, step, 0), (1, step, 1)]);
        }
    }
}
