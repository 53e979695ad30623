//! Stacks the adapters of experts as PEFT has them, from the file to which ranks have exported them one by one: columns of different
//! experts alternate there, element by element, so ranks cannot write their own.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_ckpt::export::{ExportPlan, ExportWriter};
use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::safetensors::TensorSpec;
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};

use super::PART_ELEMS;
use crate::adapter::stacks::Part;
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
    let parts = stacks::parts(spec);
    let (mut stacks, mut others): (BTreeMap<&str, Vec<(&ParamSpec, &Part)>>, Vec<String>) =
        Default::default();
    for (id, param) in spec.params.iter().enumerate().filter(|(_, param)| param.trainable) {
        match parts.get(&ParamId(id)) {
            Some(part) => stacks.entry(&part.tensor).or_default().push((param, part)),
            None => others.extend(peft::names(param)),
        }
    }
    let mut tensors = Vec::new();
    for (name, parts) in &stacks {
        let dtype = source.entry(&peft::name(parts[0].0))?.dtype();
        tensors.push(TensorSpec { name: (*name).to_owned(), dtype, shape: parts[0].1.shape.to_vec() });
    }
    for name in &others {
        let entry = source.entry(name)?;
        tensors.push(TensorSpec { name: name.clone(), dtype: entry.dtype(), shape: entry.shape().to_vec() });
    }
    let plan = ExportPlan::new(path, tensors, origin)?;
    let export = plan.create()?;
    let mut writer = plan.writer();
    for (name, parts) in stacks {
        let mut stack = vec![0.0; parts[0].1.shape.iter().product()];
        for (param, part) in parts {
            let mut values = vec![0.0; param.len()];
            source.read_rows_f64(&peft::name(param), 0..param.shape[0], &mut values)?;
            part.write(&values, &mut stack);
        }
        writer.write_f64(name, 0, &stack)?;
    }
    others.iter().try_for_each(|name| copy(source, name, &mut writer))?;
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
