//! The weights that training begins with: a model of Hugging Face, in safetensors or, as older ones are, in files of
//! `torch.save`.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use super::StateRows;
use crate::{
    checkpoint::Checkpoint,
    error::Error,
    file_io::Files,
    formats::{TORCH_INDEX, TORCH_MODEL, torch_file, torch_index},
    model_files::{INDEX_FILE, ModelReader, SINGLE_FILE, check_names, two_models},
    safetensors::TensorType,
    transfer::{NoProgress, OpenSources, Options, SourceFiles},
    verify::verify,
};

/// Nobody stops the reading of rows, which are few at a time.
static NEVER: AtomicBool = AtomicBool::new(false);

/// The open weights of a model. Reads are positioned, so they serve any number of threads.
#[derive(Debug)]
pub enum ModelWeights {
    /// In safetensors, which have no checksums.
    Safetensors(ModelReader),
    /// In files of `torch.save`.
    Torch(TorchModel),
}

/// A model in `pytorch_model.bin`, or in several such files with an index.
#[derive(Debug)]
pub struct TorchModel {
    checkpoint: Checkpoint,
    opened: Arc<OpenSources>,
}

impl ModelWeights {
    /// Opens a model directory, one safetensors file of any name, or an index of safetensors. A directory with
    /// `pytorch_model.bin` or its index is read where there are no safetensors. Only metadata is read.
    ///
    /// # Errors
    /// Those of [`ModelReader::open`], and the same for files of `torch.save`.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelWeights, Error> {
        let path = path.as_ref();
        match torch_model_in(path)? {
            Some(file) => TorchModel::open(&file).map(ModelWeights::Torch),
            None => ModelReader::open(path).map(ModelWeights::Safetensors),
        }
    }

    /// Whether a model directory has weights, sound or not.
    pub fn are_in(dir: impl AsRef<Path>) -> bool {
        let (dir, files) = (dir.as_ref(), Files::anywhere());
        [SINGLE_FILE, INDEX_FILE, TORCH_MODEL, TORCH_INDEX].iter().any(|name| files.exists(&dir.join(name)))
    }

    /// The single file or the index that was opened.
    pub fn path(&self) -> &Path {
        match self {
            ModelWeights::Safetensors(model) => model.path(),
            ModelWeights::Torch(model) => &model.checkpoint.path,
        }
    }

    /// The types of all tensors, in the order of their names.
    pub fn dtypes(&self) -> Vec<TensorType> {
        match self {
            ModelWeights::Safetensors(model) => {
                model.names().filter_map(|name| Some(model.entry(name).ok()?.dtype())).collect()
            }
            ModelWeights::Torch(model) => {
                model.checkpoint.tensors.values().map(|tensor| tensor.dtype).collect()
            }
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        match self {
            ModelWeights::Safetensors(model) => model.entry(name).is_ok(),
            ModelWeights::Torch(model) => model.checkpoint.tensors.contains_key(name),
        }
    }

    /// Fills `out` with the elements of whole rows of a tensor of floats, exactly.
    ///
    /// # Errors
    /// Those of [`ModelReader::read_rows_f64`].
    pub fn read_rows_f64(&self, name: &str, rows: Range<usize>, out: &mut [f64]) -> Result<(), Error> {
        match self {
            ModelWeights::Safetensors(model) => model.read_rows_f64(name, rows, out),
            ModelWeights::Torch(TorchModel { checkpoint, opened }) => {
                let sources = SourceFiles::checked_before(checkpoint, opened);
                StateRows::of(sources, Options::new(&NoProgress, &NEVER)).read_rows_f64(name, rows, out)
            }
        }
    }

    /// Checks that the model has exactly the expected tensors, as [`ModelReader::check_tensors`] does.
    ///
    /// # Errors
    /// [`Error::NamesDiffer`] with *all* missing, unexpected, wrongly shaped and wrongly typed tensors.
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
            ModelWeights::Torch(TorchModel { checkpoint: Checkpoint { tensors, path, .. }, .. }) => {
                let names = tensors.keys().map(String::as_str);
                let find = |name: &str| {
                    let tensor = tensors.get(name)?;
                    let size = |&size: &u64| usize::try_from(size).unwrap_or(usize::MAX);
                    Some((tensor.dtype, tensor.shape.iter().map(size).collect()))
                };
                check_names(path, (names, find), expected, ignored, accepts)
            }
        }
    }

    /// Reads everything that the format protects by checksums, and holds it against these. Rows that are read later are
    /// not checked again.
    ///
    /// # Errors
    /// [`Error::Malformed`] for bytes that do not match, [`Error::NotWhole`], [`Error::Io`].
    pub fn check_sums(&self) -> Result<(), Error> {
        let ModelWeights::Torch(TorchModel { checkpoint, .. }) = self else { return Ok(()) };
        Error::all_of(verify(checkpoint, &Options::new(&NoProgress, &NEVER))?.problems)
    }
}

impl TorchModel {
    fn open(file: &Path) -> Result<TorchModel, Error> {
        let is_index = file.ends_with(TORCH_INDEX);
        let checkpoint = if is_index { torch_index::open(file)? } else { torch_file::open(file)? };
        let opened = Arc::new(OpenSources::new(&Files::anywhere(), &checkpoint));
        Ok(TorchModel { checkpoint, opened })
    }
}

/// The file or the index of a model of `torch.save`, in a directory that has no safetensors.
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
