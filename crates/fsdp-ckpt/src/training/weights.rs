//! The initial weights of training: a Hugging Face model, in safetensors or, for older models, in `torch.save` files.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use super::{
    StateRows,
    bitsandbytes::{Bitsandbytes, Nf4Weight},
    decoded::Decoded,
    mxfp4::Mxfp4Weight,
};
use crate::{
    checkpoint::{Checkpoint, Experts, Tensor, is_of_text_part, is_stack_of_experts},
    conversion::expert_names_beside,
    error::Error,
    file_io::Files,
    formats::{TORCH_INDEX, TORCH_MODEL, safetensors_files, torch_file, torch_index},
    model_files::{INDEX_FILE, ModelReader, SINGLE_FILE, check_names, two_models},
    safetensors::TensorType,
    transfer::{NoProgress, OpenSources, Options, SourceFiles},
    verify::verify,
};

/// Reading rows is never canceled, because only a few are read at a time.
static NEVER: AtomicBool = AtomicBool::new(false);

/// The open weights of a model. Reads are positioned, so any number of threads can read at once.
#[derive(Debug)]
pub enum ModelWeights {
    /// Weights in safetensors, which have no checksums.
    Safetensors(ModelReader),
    /// Weights that are read through the view of a checkpoint: in `torch.save` files, with stacked experts, or of a model of text
    /// and images.
    Viewed(ViewedModel),
}

/// A model in `pytorch_model.bin` or in several such files with an index, one in safetensors whose experts are
/// stacked, or the base of adapters in a checkpoint.
#[derive(Debug)]
pub struct ViewedModel {
    checkpoint: Checkpoint,
    opened: Arc<OpenSources>,
    /// Weights that are in 4 bits.
    decoded: Option<Box<Decoded>>,
}

impl ModelWeights {
    /// Opens a model directory, a safetensors file of any name, or a safetensors index. In a directory without
    /// safetensors, `pytorch_model.bin` or its index is used. Reads only metadata.
    ///
    /// # Errors
    /// Those of [`ModelReader::open`], and the same for `torch.save` files.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelWeights, Error> {
        let path = path.as_ref();
        if let Some(file) = torch_model_in(path)? {
            return ViewedModel::open(&file).map(ModelWeights::Viewed);
        }
        let model = ModelReader::open(path)?;
        if model.names().any(is_of_text_part) {
            let text = safetensors_files::from_model(&model)?.text_part();
            return ViewedModel::of(text).map(ModelWeights::Viewed);
        }
        let is_stack = |name: &str| is_stack_of_experts(name.strip_suffix("_blocks").unwrap_or(name));
        if Bitsandbytes::is_in(&model) || model.names().any(is_stack) {
            let viewed = ViewedModel::of(safetensors_files::from_model(&model)?)?;
            let decoded = Decoded::of(model)?.map(Box::new);
            return Ok(ModelWeights::Viewed(ViewedModel { decoded, ..viewed }));
        }
        Ok(ModelWeights::Safetensors(model))
    }

    /// Opens the base of adapters in a checkpoint of another trainer; `names` are those of the model's parameters. `None`
    /// if the checkpoint has no adapters, or has them without their base. Reads only metadata.
    ///
    /// # Errors
    /// Those of [`formats::open`](crate::formats::open); [`Error::BadRequest`] for a base whose rows cannot be read.
    pub fn base_in<'a>(
        path: &Path,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<Option<ModelWeights>, Error> {
        Ok(ViewedModel::base_in(path, names)?.map(ModelWeights::Viewed))
    }

    /// Whether a model directory contains weights, valid or not.
    pub fn are_in(dir: impl AsRef<Path>) -> bool {
        let (dir, files) = (dir.as_ref(), Files::anywhere());
        [SINGLE_FILE, INDEX_FILE, TORCH_MODEL, TORCH_INDEX].iter().any(|name| files.exists(&dir.join(name)))
    }

    /// Path of the single file or the index that was opened.
    pub fn path(&self) -> &Path {
        match self {
            ModelWeights::Safetensors(model) => model.path(),
            ModelWeights::Viewed(model) => &model.checkpoint.path,
        }
    }

    /// Returns the dtypes of all tensors, in the order of their names.
    pub fn dtypes(&self) -> Vec<TensorType> {
        match self {
            ModelWeights::Safetensors(model) => {
                model.names().filter_map(|name| Some(model.entry(name).ok()?.dtype())).collect()
            }
            ModelWeights::Viewed(model) => model.tensors().map(|(_, tensor)| tensor.dtype).collect(),
        }
    }

    /// Whether a tensor of this name exists.
    pub fn has(&self, name: &str) -> bool {
        match self {
            ModelWeights::Safetensors(model) => model.entry(name).is_ok(),
            ModelWeights::Viewed(model) => {
                model.checkpoint.tensors.contains_key(name) || model.decoded_shape(name).is_some()
            }
        }
    }

    /// Fills `out` with the elements of whole rows of a float tensor, exactly.
    ///
    /// # Errors
    /// Those of [`ModelReader::read_rows_f64`].
    pub fn read_rows_f64(&self, name: &str, rows: Range<usize>, out: &mut [f64]) -> Result<(), Error> {
        match self {
            ModelWeights::Safetensors(model) => model.read_rows_f64(name, rows, out),
            ModelWeights::Viewed(ViewedModel { decoded: Some(decoded), .. })
                if decoded.shape(name).is_some() =>
            {
                decoded.read_rows_f64(name, rows, out)
            }
            ModelWeights::Viewed(ViewedModel { checkpoint, opened, .. }) => {
                let sources = SourceFiles::checked_before(checkpoint, opened);
                StateRows::of(sources, Options::new(&NoProgress, &NEVER)).read_rows_f64(name, rows, out)
            }
        }
    }

    /// A weight of an expert in MXFP4; `None` if it is stored in another way.
    pub fn mxfp4(&self, name: &str) -> Option<Mxfp4Weight<'_>> {
        let ModelWeights::Viewed(ViewedModel { decoded: Some(decoded), .. }) = self else { return None };
        decoded.mxfp4(name)
    }

    /// A weight in 4 bits as bitsandbytes saved it; `None` if it is stored in another way.
    pub fn nf4(&self, name: &str) -> Option<Nf4Weight<'_>> {
        let ModelWeights::Viewed(ViewedModel { decoded: Some(decoded), .. }) = self else { return None };
        decoded.nf4(name)
    }

    /// Checks that the model has exactly the expected tensors, like [`ModelReader::check_tensors`].
    ///
    /// # Errors
    /// [`Error::NamesDiffer`] with *all* tensors that are missing, unexpected, or of another shape or dtype.
    pub fn check_tensors<N, S>(
        &self,
        expected: impl IntoIterator<Item = (N, S)>,
        ignored: impl Fn(&str) -> bool,
        accepts: impl Fn(TensorType) -> bool,
    ) -> Result<(), Error>
    where
        N: AsRef<str>,
        S: AsRef<[usize]>,
    {
        match self {
            ModelWeights::Safetensors(model) => model.check_tensors(expected, ignored, accepts),
            ModelWeights::Viewed(model) => {
                let Checkpoint { tensors, path, .. } = &model.checkpoint;
                let names = model.tensors().map(|(name, _)| name);
                let names = names.chain(model.decoded.iter().flat_map(|decoded| decoded.names()));
                let find = |name: &str| {
                    if let Some(shape) = model.decoded_shape(name) {
                        return Some((TensorType::Bf16, shape.to_vec()));
                    }
                    let tensor = tensors.get(name)?;
                    let size = |&size: &u64| usize::try_from(size).unwrap_or(usize::MAX);
                    Some((tensor.dtype, tensor.shape.iter().map(size).collect()))
                };
                check_names(path, (names, find), expected, ignored, accepts)
            }
        }
    }

    /// Reads and verifies everything that the format protects by checksums. Rows that are read later are not verified
    /// again.
    ///
    /// # Errors
    /// [`Error::Malformed`] for bytes that do not match, [`Error::NotWhole`], [`Error::Io`].
    pub fn check_sums(&self) -> Result<(), Error> {
        let ModelWeights::Viewed(ViewedModel { checkpoint, .. }) = self else { return Ok(()) };
        Error::all_of(verify(checkpoint, &Options::new(&NoProgress, &NEVER))?.problems)
    }
}

impl ViewedModel {
    fn open(file: &Path) -> Result<ViewedModel, Error> {
        let is_index = file.ends_with(TORCH_INDEX);
        let checkpoint = if is_index { torch_index::open(file)? } else { torch_file::open(file)? };
        ViewedModel::of(checkpoint)
    }

    /// Opens the files of a checkpoint. Stacked experts are read one by one, under the names that the family of the
    /// model publishes.
    pub(super) fn of(mut checkpoint: Checkpoint) -> Result<ViewedModel, Error> {
        if checkpoint.has_fused_experts()
            && let Some(names) = expert_names_beside(&checkpoint.path)?
        {
            checkpoint = checkpoint.with_experts(Experts::Separate(names))?;
        }
        let opened = Arc::new(OpenSources::new(&Files::anywhere(), &checkpoint));
        Ok(ViewedModel { checkpoint, opened, decoded: None })
    }

    /// The tensors of the files, without the parts of weights in 4 bits.
    fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        let is_part = |name: &str| self.decoded.as_ref().is_some_and(|decoded| decoded.has_part(name));
        let tensors = self.checkpoint.tensors.iter().map(|(name, tensor)| (&name[..], tensor));
        tensors.filter(move |(name, _)| !is_part(name))
    }

    fn decoded_shape(&self, name: &str) -> Option<[usize; 2]> {
        self.decoded.as_ref()?.shape(name)
    }
}

/// Returns the file or the index of a `torch.save` model, in a directory without safetensors.
fn torch_model_in(dir: &Path) -> Result<Option<PathBuf>, Error> {
    let files = Files::anywhere();
    let find = |name| Some(dir.join(name)).filter(|path| files.exists(path));
    if !files.is_directory(dir) || find(SINGLE_FILE).or_else(|| find(INDEX_FILE)).is_some() {
        return Ok(None);
    }
    match (find(TORCH_MODEL), find(TORCH_INDEX)) {
        (Some(single), Some(index)) => Err(two_models(&single, &index)),
        (single, index) => Ok(single.or(index)),
    }
}
