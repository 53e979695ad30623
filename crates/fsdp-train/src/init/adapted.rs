//! Initial values of a model with adapters: a frozen base, and adapters that are new or read from PEFT's files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_ckpt::digest::{Digest, DigestKind};
use fsdp_ckpt::is_url;
use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::safetensors::TensorType;
use fsdp_ckpt::training::ModelWeights;
use fsdp_config::Resolved;
use fsdp_core::engine::Origin;
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_core::update::Piece;
use fsdp_nn::Init;
use fsdp_nn::layer::{Description, Linear, PackedWeight};
use rayon::prelude::*;

use super::{InitSource, QuantizedWeight, check_pretrained, names, row_lengths, stored_name};
use crate::adapter::merges;
use crate::adapter::peft::{self, ADAPTER_FILE, PeftConfig};
use crate::adapter::stacks::{self, Part};
use crate::error::TrainError;

/// Elements of a parameter that the digest of a base reads at a time (at least one row).
const SAMPLE_ELEMS: usize = 1 << 12;

/// Minimum number of places that the digest reads in each parameter, unless it reads all of it.
const SAMPLES_MIN: usize = 16;

/// The source of the parameters of an adapted model.
#[derive(Debug)]
pub struct AdaptedInit {
    base: InitSource,
    /// Digest of the weights of the base; `None` if they are not read from files.
    base_digest: Option<String>,
    /// The checkpoint of another trainer from which the base is read; `None` if it is read from `model.path`.
    taken_base: Option<TakenBase>,
    /// Adapters trained earlier, and where those of experts are in their file; `None` if they are new.
    adapter: Option<(ModelReader, BTreeMap<ParamId, Part>)>,
    /// Seed of new adapters.
    seed: u64,
    init: Vec<Init>,
    /// Weights of the base that are quantized.
    quantized: BTreeMap<ParamId, PackedWeight>,
    /// The linear maps whose rows have the lengths that magnitudes begin with.
    magnitudes: BTreeMap<ParamId, Linear>,
    /// Index of the first parameter that belongs to an adapter.
    first_added: usize,
}

/// A base that is read from the checkpoint of another trainer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TakenBase {
    /// The checkpoint.
    pub(crate) path: PathBuf,
    /// Whether `model.path` has weights, which then are others.
    pub(crate) differs: bool,
}

impl AdaptedInit {
    /// Opens the source of a model to which [`adapt`](crate::adapter::adapt) added the run file's adapter, on top of the source
    /// of its base. If `taken` is the checkpoint of another trainer and holds a base, this is the base, unless both are
    /// the same.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`], [`TrainError::Input`]: a base or an adapter that cannot be read, or an adapter
    /// that differs from the run file; [`TrainError::Misfit`]: a checkpoint of the base that is gone, or a merge with a base
    /// that is in no file.
    pub fn open(
        config: &Resolved,
        description: &Description,
        mut base: InitSource,
        taken: Option<&Path>,
    ) -> Result<Self, TrainError> {
        let first_added = description.spec.params.len() - description.added;
        let params = &description.spec.params[..first_added];
        let mut base_digest = match &base {
            InitSource::Pretrained(reader) => Some(checked_digest(reader, params)?),
            _ => None,
        };
        let mut taken_base = None;
        if let Some((path, held)) = base_in(taken, params, base_digest.is_some())? {
            let held_digest = Some(checked_digest(&held, params)?);
            if held_digest != base_digest {
                taken_base = Some(TakenBase { path, differs: base_digest.is_some() });
                (base, base_digest) = (InitSource::Pretrained(Arc::new(held)), held_digest);
            }
        }
        if merges(config) && base_digest.is_none() {
            let reason = "adapters cannot be merged with random weights (model.init), which are in no file; \
                          remove the key, or set model.init = \"pretrained\"";
            return Err(TrainError::Misfit { key: "adapter.merge", reason: reason.to_owned() });
        }
        let path = config.adapter.as_ref().and_then(|adapter| Some((adapter, adapter.path.as_deref()?)));
        let adapter = match path {
            None => None,
            Some((adapter, path)) => {
                PeftConfig::read(Path::new(path))?.expect(adapter)?;
                let file = ModelReader::open(Path::new(path).join(ADAPTER_FILE))?;
                Some((file, stacks::parts(&description.spec)))
            }
        };
        let (seed, init, quantized) =
            (config.model.seed, description.init.clone(), description.quantized.clone());
        let magnitude = |(_, linear): &(usize, Linear)| {
            Some((description.adapters.get(&linear.weight)?.magnitude?, *linear))
        };
        let magnitudes = description.linears.iter().filter_map(magnitude).collect();
        Ok(Self { base, base_digest, taken_base, adapter, seed, init, quantized, magnitudes, first_added })
    }

    pub(super) fn base(&self) -> &InitSource {
        &self.base
    }

    pub(super) fn origin(&self) -> Origin {
        if self.adapter.is_some() { Origin::Read } else { self.base.origin() }
    }

    pub(super) fn base_digest(&self) -> Option<&str> {
        self.base_digest.as_deref()
    }

    pub(super) fn taken_base(&self) -> Option<&TakenBase> {
        self.taken_base.as_ref()
    }

    pub(super) fn fill(&self, spec: &ModelSpec, piece: &Piece, values: &mut [f64]) -> Result<(), TrainError> {
        let (id, param) = (piece.param.0, spec.param(piece.param));
        match &self.adapter {
            Some((file, parts)) if param.trainable => {
                let first = piece.param_offset / piece.row_len;
                let rows = first..first + piece.len / piece.row_len;
                match parts.get(&piece.param) {
                    Some(part) => part.read(file, rows, values)?,
                    None => file.read_rows_f64(&peft::name(param), rows, values)?,
                }
            }
            _ if id >= self.first_added => match self.magnitudes.get(&piece.param) {
                Some(linear) => self.fill_magnitude(spec, piece, linear, values)?,
                None => self.init[id].fill_f64(self.seed, &param.fqn, piece.param_offset, values),
            },
            _ => match self.quantized.get(&piece.param) {
                Some(&weight) => self.fill_quantized(spec, piece, weight, values)?,
                None => self.base.fill(spec, piece, values)?,
            },
        }
        Ok(())
    }

    /// Writes the lengths of the rows of a weight of the base: of what is decoded, if it is quantized.
    fn fill_magnitude(
        &self,
        spec: &ModelSpec,
        piece: &Piece,
        linear: &Linear,
        values: &mut [f64],
    ) -> Result<(), TrainError> {
        let weight = spec.param(linear.weight);
        let of_base =
            |rows: Range<usize>, values: &mut [f64]| self.read_base(spec, linear.weight, rows, values);
        let quantized = self.quantized.get(&linear.weight);
        let quantized = quantized
            .map(|&matrix| QuantizedWeight::new(weight, matrix, self.base.pretrained(), &of_base))
            .transpose()?;
        let read = |rows: Range<usize>, values: &mut [f64]| match &quantized {
            Some(weight) => weight.values(rows, values),
            None => of_base(rows, values),
        };
        let outputs = piece.param_offset..piece.param_offset + piece.len;
        row_lengths(&weight.fqn, linear, outputs, &read, values)
    }

    /// Writes the bytes of a piece as numbers.
    fn fill_quantized(
        &self,
        spec: &ModelSpec,
        piece: &Piece,
        weight: PackedWeight,
        values: &mut [f64],
    ) -> Result<(), TrainError> {
        let read = |rows: Range<usize>, values: &mut [f64]| self.read_base(spec, piece.param, rows, values);
        let weight = QuantizedWeight::new(spec.param(piece.param), weight, self.base.pretrained(), &read)?;
        let first = piece.param_offset / piece.row_len;
        let bytes = weight.bytes(first..first + piece.len / piece.row_len)?;
        values.iter_mut().zip(bytes).for_each(|(value, byte)| *value = f64::from(byte));
        Ok(())
    }

    /// Reads rows of a matrix of the base.
    fn read_base(
        &self,
        spec: &ModelSpec,
        param: ParamId,
        rows: Range<usize>,
        values: &mut [f64],
    ) -> Result<(), TrainError> {
        let row_len = values.len() / rows.len().max(1);
        let piece =
            Piece { param, offset: 0, len: values.len(), param_offset: rows.start * row_len, row_len };
        self.base.fill(spec, &piece, values)
    }

    /// Checks that the adapter files hold exactly the trained parameters; [`AdaptedInit::open`] has checked the base.
    pub(super) fn check(&self, spec: &ModelSpec) -> Result<(), TrainError> {
        let Some((file, parts)) = &self.adapter else { return Ok(()) };
        let trained = spec.params.iter().enumerate().filter(|(_, param)| param.trainable);
        let expected = trained.flat_map(|(id, param)| match parts.get(&ParamId(id)) {
            Some(part) => vec![(part.tensor.clone(), &part.shape[..])],
            None => peft::names(param).map(|name| (name, &param.shape[..])).collect(),
        });
        Ok(file.check_tensors(expected, |_| false, TensorType::is_convertible)?)
    }
}

impl InitSource {
    /// Wraps this source, that of the base, in the source of the adapted model; returns it unchanged if the run file
    /// has no adapter. `taken` is the checkpoint of another trainer that may hold the base instead
    /// ([`base_of`](crate::train::base_of)).
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`], [`TrainError::Input`], [`TrainError::Misfit`]: a base or an adapter that cannot be read, or
    /// that does not fit the run file.
    pub fn adapted(
        self,
        config: &Resolved,
        description: &Description,
        taken: Option<&Path>,
    ) -> Result<Self, TrainError> {
        match &config.adapter {
            None => Ok(self),
            Some(_) => {
                Ok(InitSource::Adapted(Arc::new(AdaptedInit::open(config, description, self, taken)?)))
            }
        }
    }
}

/// Opens the base in a checkpoint; `None` if it has none, or if the checkpoint is gone and there is another base.
fn base_in(
    taken: Option<&Path>,
    params: &[ParamSpec],
    has_other: bool,
) -> Result<Option<(PathBuf, ModelWeights)>, TrainError> {
    let Some(path) = taken else { return Ok(None) };
    if !is_url(path) && !path.exists() {
        let reason = format!(
            "the base of the adapters was read from {}, which is gone: put it back, or set model.init = \"pretrained\" and \
             model.path to the same weights",
            path.display()
        );
        return if has_other { Ok(None) } else { Err(TrainError::Misfit { key: "model.path", reason }) };
    }
    let held = ModelWeights::base_in(path, params.iter().flat_map(names))?;
    Ok(held.map(|held| (path.to_owned(), held)))
}

/// Checks that files hold exactly these parameters, and returns the digest of their values.
fn checked_digest(reader: &ModelWeights, params: &[ParamSpec]) -> Result<String, TrainError> {
    check_pretrained(reader, params)?;
    digest(reader, params)
}

/// CRC-64 of values of all parameters in their order, each as eight little-endian bytes, so that it does not depend on
/// the file format. Every process of a run computes it, so large parameters are sampled: evenly spaced rows suffice,
/// since training changes values everywhere.
fn digest(reader: &ModelWeights, params: &[ParamSpec]) -> Result<String, TrainError> {
    let samples = params.iter().flat_map(|param| {
        let row_len = param.shape.iter().skip(1).product::<usize>();
        sampled_rows(param).map(move |rows| (stored_name(reader, param), rows.len() * row_len, rows))
    });
    let samples = samples.collect::<Vec<_>>().into_par_iter();
    let digests = samples.map(|(name, len, rows)| -> Result<(Digest, u64), TrainError> {
        let mut values = vec![0.0; len];
        reader.read_rows_f64(name, rows, &mut values)?;
        let bytes: Vec<u8> = values.into_iter().flat_map(f64::to_le_bytes).collect();
        Ok((DigestKind::Crc64.of(&bytes), bytes.len() as u64))
    });
    let digests = digests.collect::<Result<Vec<_>, _>>()?;
    let total =
        digests.into_iter().fold(DigestKind::Crc64.empty(), |total, (part, len)| total.then(part, len));
    Ok(total.to_string())
}

/// The rows of a parameter that [`digest`] reads.
fn sampled_rows(param: &ParamSpec) -> impl Iterator<Item = Range<usize>> + use<> {
    let rows = param.shape.first().copied().unwrap_or(1);
    let row_len = param.shape.iter().skip(1).product::<usize>();
    let block = (SAMPLE_ELEMS / row_len.max(1)).max(1);
    let every = (rows / block / SAMPLES_MIN).max(1);
    (0..rows).step_by(block * every).map(move |first| first..rows.min(first + block))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_parameters_are_read_fully_large_ones_sampled_evenly() {
        for shape in
            [vec![], vec![7], vec![64, 1000], vec![128_256, 4096], vec![3, 2_000_000], vec![50_000_000]]
        {
            let rows = shape.first().copied().unwrap_or(1);
            let param = ParamSpec {
                fqn: "p".into(),
                aliases: vec![],
                shape: shape.clone(),
                trainable: false,
                expert: None,
                quantized: None,
                keep_f32: false,
            };
            let sampled: Vec<Range<usize>> = sampled_rows(&param).collect();
            assert!(sampled.is_sorted_by_key(|rows| rows.start), "{shape:?}");
            assert!(sampled.windows(2).all(|pair| pair[0].end <= pair[1].start), "{shape:?}");
            assert!(sampled.last().is_some_and(|last| last.end <= rows), "{shape:?}");
            let read: usize = sampled.iter().map(ExactSizeIterator::len).sum();
            assert!(read == rows || sampled.len() >= SAMPLES_MIN, "{shape:?}: {} places", sampled.len());
            assert!(
                read == rows || rows - sampled[sampled.len() - 1].end < rows / SAMPLES_MIN,
                "{shape:?}: the end"
            );
        }
    }
}
