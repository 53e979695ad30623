//! Stacks the adapters of experts as PEFT has them, from the file to which ranks have exported them one by one: columns of different
//! experts alternate there, element by element, so ranks cannot write their own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fsdp_ckpt::export::{ExportPlan, ExportWriter};
use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::safetensors::TensorSpec;
use fsdp_core::model::ModelSpec;

use super::PART_ELEMS;
use crate::adapter::{peft, stacks};
use crate::error::TrainError;

/// Writes the adapters in `source` to `path`. One stack at a time is in memory.
///
/// # Errors
/// [`TrainError::Checkpoint`].
pub(super) fn write(
    spec: &ModelSpec,
    source: &ModelReader,
    path: &Path,
    origin: BTreeMap<String, String>,
) -> Result<(), TrainError> {
    let mut stacks: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let mut stacked = BTreeSet::new();
    let parts = stacks::parts(spec);
    for (id, part) in &parts {
        let name = peft::name(spec.param(*id));
        stacked.insert(name.clone());
        stacks.entry((&part.tensor, part.shape)).or_default().push((name, part));
    }
    let tensor = |name: &str, given: &str, shape: Option<[usize; 2]>| -> Result<TensorSpec, TrainError> {
        let entry = source.entry(given)?;
        let shape = shape.map_or_else(|| entry.shape().to_vec(), Vec::from);
        Ok(TensorSpec { name: name.to_owned(), dtype: entry.dtype(), shape })
    };
    let others = || source.names().filter(|name| !stacked.contains(*name));
    let of_stacks = stacks.iter().map(|((name, shape), parts)| tensor(name, &parts[0].0, Some(*shape)));
    let tensors = of_stacks.chain(others().map(|name| tensor(name, name, None)));
    let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
    let plan = ExportPlan::new(path, tensors, origin)?;
    let export = plan.create()?;
    let mut writer = plan.writer();
    for ((name, [rows, columns]), parts) in &stacks {
        let mut stack = vec![0.0; rows * columns];
        for (name, part) in parts {
            let rows = source.entry(name)?.row_count();
            let mut values = vec![0.0; rows * source.entry(name)?.row_len() as usize];
            source.read_rows_f64(name, 0..rows, &mut values)?;
            part.write(&values, &mut stack);
        }
        writer.write_f64(name, 0, &stack)?;
    }
    others().try_for_each(|name| copy(source, name, &mut writer))?;
    export.commit([writer.finish()?])?;
    Ok(())
}

/// Copies a tensor, some rows at a time.
fn copy(source: &ModelReader, name: &str, writer: &mut ExportWriter) -> Result<(), TrainError> {
    let entry = source.entry(name)?;
    let (rows, row_bytes) = (entry.row_count(), entry.row_bytes() as usize);
    let block = (PART_ELEMS / row_bytes.max(1)).max(1);
    for first in (0..rows).step_by(block) {
        let rows = first..rows.min(first + block);
        let mut bytes = vec![0; rows.len() * row_bytes];
        source.read_rows(name, rows, &mut bytes)?;
        writer.write_rows(name, first, &bytes)?;
    }
    Ok(())
}
