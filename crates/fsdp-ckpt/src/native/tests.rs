//! Tests of whole saves, on a file system that fails.

mod clearing;
mod crash;
mod damage;
#[cfg(feature = "object-store")]
mod objects;
mod space;

use std::path::Path;

use serde_json::{Map, json};

use super::*;
use crate::{
    checkpoint::{Key, Role},
    error::Error,
    file_io::Files,
    files::testing::{FaultyFiles, Survival},
    safetensors::{TensorSpec, TensorType},
};

/// What survives a crash of the changes that were not durable; every crash test tries all of them.
const SURVIVALS: [Survival; 9] = [
    Survival::Nothing,
    Survival::Everything,
    Survival::NamesOnly,
    Survival::DataOnly,
    Survival::LastOnly,
    Survival::Chance(1),
    Survival::Chance(2),
    Survival::Chance(3),
    Survival::Chance(4),
];

fn run_dir(files: &FaultyFiles) -> RunDir {
    RunDir::on(Files::of(std::sync::Arc::new(files.clone())), "/run".into())
}

fn open(files: &FaultyFiles, dir: &Path) -> Result<NativeReader, Error> {
    NativeReader::open_on(Files::of(std::sync::Arc::new(files.clone())), dir.to_owned())
}

fn tensor(name: &str, dtype: TensorType, shape: &[usize], world: usize) -> SavedTensor {
    let rows = even_rows(shape.first().copied().unwrap_or(1), world);
    let spec = TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() };
    SavedTensor { spec, path: vec![Key::Name(name.to_owned())], role: Role::Model, rows }
}

fn plan(world: usize) -> SavePlan {
    let tensors = vec![
        tensor("w", TensorType::F32, &[9, 3], world),
        tensor("m", TensorType::Bf16, &[6], world),
        tensor("step", TensorType::I64, &[], world),
        tensor("none", TensorType::U8, &[0, 2], world),
    ];
    SavePlan::new(world, tensors).unwrap()
}

fn row_bytes(tensor: &SavedTensor) -> usize {
    tensor.spec.shape.iter().skip(1).product::<usize>() * tensor.spec.dtype.size_bytes()
}

/// Returns the bytes of all rows of a tensor at a step.
fn data(tensor: &SavedTensor, step: u64) -> Vec<u8> {
    let len = tensor.row_count() * row_bytes(tensor);
    (0..len).map(|index| (index as u64 * 31 + step * 101 + tensor.spec.name.len() as u64) as u8).collect()
}

fn write_row(save: &mut RankSave, tensor: &SavedTensor, row: usize, step: u64) -> Result<(), Error> {
    let (len, data) = (row_bytes(tensor), data(tensor, step));
    save.write_rows(&tensor.spec.name, row, &data[row * len..][..len])
}

/// Saves with all ranks in one thread, which take turns row by row. Sets `is_committed` to the result of the commit.
fn save(lock: &RunLock, plan: &SavePlan, step: u64, is_committed: &mut bool) -> Result<(), Error> {
    let saved = save_parts(lock, plan, step).and_then(|reports| {
        let state = json!({ "step": step }).as_object().cloned().unwrap_or_else(Map::new);
        lock.commit(plan, step, state, reports)
    });
    *is_committed = saved.is_ok();
    assert!(saved.as_ref().map_or(true, |complete| *complete == lock.run().checkpoint(step)));
    saved.map(drop)
}

fn save_parts(lock: &RunLock, plan: &SavePlan, step: u64) -> Result<Vec<RankReport>, Error> {
    let ranks = 0..plan.world_size();
    let mut parts = ranks
        .map(|rank| RankSave::create(lock.run(), lock.attempt(), plan, step, rank))
        .collect::<Result<Vec<_>, _>>()?;
    for tensor in plan.tensors() {
        let turns = tensor.rows.iter().map(|rows| rows.len()).max().unwrap_or(0);
        for turn in 0..turns {
            for (part, rows) in parts.iter_mut().zip(&tensor.rows).filter(|(_, rows)| turn < rows.len()) {
                write_row(part, tensor, rows.start + turn, step)?;
            }
        }
    }
    parts.into_iter().map(RankSave::finish).collect()
}

/// Checks that the checkpoint of a step is complete and contains what was saved at that step.
fn check(files: &FaultyFiles, plan: &SavePlan, step: u64) {
    check_in(&run_dir(files), plan, step);
}

fn check_in(run: &RunDir, plan: &SavePlan, step: u64) {
    let reader = NativeReader::open_on(run.files.clone(), run.checkpoint(step)).unwrap();
    assert_eq!(reader.manifest().run_state["step"], step);
    for tensor in plan.tensors() {
        let expected = data(tensor, step);
        let mut got = vec![0; expected.len()];
        reader.read_rows(&tensor.spec.name, 0..tensor.row_count(), &mut got).unwrap();
        assert_eq!(got, expected);
    }
    reader.verify().unwrap();
}
