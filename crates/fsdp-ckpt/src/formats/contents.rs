//! Detects the format of a file from its first bytes, and of a directory from its file names and the first bytes of
//! some files.

use std::path::{Path, PathBuf};

use super::{dcp, deepspeed, megatron, megatron_ranks, orbax, rank_names::TORCH_ENDINGS, trainer_folder};
use crate::{
    error::Error,
    file_io::{Files, PathFile},
    model_files::{INDEX_FILE, SINGLE_FILE},
    native::{Attempt, MANIFEST_FILE},
    torch::LEGACY_MAGIC,
};

/// The first bytes of a zip archive, as `torch.save` writes them.
const ZIP_START: &[u8] = b"PK\x03\x04";

/// Bytes at the start of a file that identify its format.
const START_BYTES: u64 = 16;

/// The model file of older Hugging Face directories.
pub(crate) const TORCH_MODEL: &str = "pytorch_model.bin";

/// The index of such a model that is split over several files.
pub(crate) const TORCH_INDEX: &str = "pytorch_model.bin.index.json";

/// [`TORCH_MODEL`], and the model file of FSDP's full state dict in a trainer's folder.
const TORCH_MODELS: [&str; 2] = [TORCH_MODEL, "pytorch_model_fsdp.bin"];

/// The format of a file, as its first bytes show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileKind {
    Empty,
    Zip,
    /// `torch.save` before PyTorch 1.6.
    Legacy,
    Safetensors,
    Json,
    Other,
}

/// Detects the format of the file at a path.
pub(super) fn kind_at(path: &Path) -> Result<FileKind, Error> {
    Ok(kind_of(&start_of(path)?))
}

pub(super) fn start_of(path: &Path) -> Result<Vec<u8>, Error> {
    let (file, len) = PathFile::open(path)?;
    file.read_first(len.min(START_BYTES))
}

pub(super) fn kind_of(start: &[u8]) -> FileKind {
    match start {
        [] => FileKind::Empty,
        start if start.starts_with(ZIP_START) => FileKind::Zip,
        start if start.starts_with(LEGACY_MAGIC) => FileKind::Legacy,
        // A header length below 2^40, then the header, which may begin with white space.
        [_, _, _, _, _, 0, 0, 0, header @ ..] if is_object_start(header) => FileKind::Safetensors,
        start if start.trim_ascii_start().starts_with(b"{") => FileKind::Json,
        _ => FileKind::Other,
    }
}

/// Whether a text begins with a JSON object, or with white space as far as it is known.
fn is_object_start(text: &[u8]) -> bool {
    !text.is_empty() && matches!(text.trim_ascii_start().first(), None | Some(b'{'))
}

/// Whether a directory holds a checkpoint. Looks only at file names and first bytes.
pub(super) fn holds_checkpoint(dir: &Path) -> bool {
    contents(dir).is_ok_and(|contents| !matches!(contents, Contents::Unknown))
}

/// The contents of a directory.
pub(super) enum Contents {
    /// A native checkpoint.
    Native,
    /// A PyTorch distributed checkpoint (DCP).
    Dcp,
    /// A checkpoint of Megatron Core, whose tensors are in DCP files.
    Megatron,
    /// Folders of ranks of Megatron-LM.
    MegatronRanks,
    /// A model in safetensors files, with an index.
    Index(PathBuf),
    /// Safetensors files without an index.
    Safetensors(Vec<String>),
    /// `torch.save` files with an index.
    TorchIndex(PathBuf),
    /// One `torch.save` file.
    TorchFile(PathBuf),
    /// Several `torch.save` files without an index.
    TorchFiles(Vec<String>),
    /// An item of Orbax, or a step with items.
    Orbax,
    /// DeepSpeed's files, in the folder that `latest` names.
    DeepSpeed,
    /// A model in a subfolder, with a trainer's other files beside it.
    ModelFolder(PathBuf),
    /// Files that a trainer saves beside a model, but no model.
    NoModel(Vec<String>),
    /// Nothing of a known format.
    Unknown,
}

impl Contents {
    /// Whether a file of the directory belongs to the checkpoint in it.
    pub(super) fn has_part(&self, path: &Path) -> bool {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
        match self {
            Contents::Native => {
                name == MANIFEST_FILE || (name.starts_with("shard-") && ends(&[".safetensors"]))
            }
            Contents::Dcp | Contents::Megatron => {
                name == dcp::METADATA_FILE || name == dcp::FIRST_RANK_METADATA_FILE || ends(&[".distcp"])
            }
            Contents::Orbax => orbax::is_part(&name),
            Contents::Index(_) => ends(&[".safetensors"]),
            Contents::Safetensors(names) => names.iter().any(|part| *part == name),
            Contents::TorchIndex(_) => ends(&TORCH_ENDINGS),
            Contents::TorchFile(_)
            | Contents::TorchFiles(_)
            | Contents::DeepSpeed
            | Contents::MegatronRanks
            | Contents::ModelFolder(_)
            | Contents::NoModel(_)
            | Contents::Unknown => false,
        }
    }

    /// Whether a known file name or an index identifies the model, rather than the lack of any other candidate.
    fn is_named(&self) -> bool {
        match self {
            Contents::TorchFile(path) => TORCH_MODELS.iter().any(|name| path.ends_with(name)),
            Contents::Safetensors(names) => names.iter().any(|name| name == SINGLE_FILE),
            Contents::TorchFiles(_) | Contents::Unknown => false,
            _ => true,
        }
    }
}

/// Detects the contents of a directory from its file names and the first bytes of some files.
pub(super) fn contents(dir: &Path) -> Result<Contents, Error> {
    let names = Files::anywhere().list(dir)?;
    // A trainer may save 16-bit weights beside DeepSpeed's files, which hold more precise weights.
    if deepspeed::is_named_in(dir, &names) {
        return Ok(Contents::DeepSpeed);
    }
    if megatron_ranks::is_at(dir, &names) {
        return Ok(Contents::MegatronRanks);
    }
    if orbax::is_at(dir, &names) {
        return Ok(Contents::Orbax);
    }
    // A trainer's other files are taken for a model only if there is nothing else.
    let of_model =
        names.iter().filter(|name| !trainer_folder::is_beside_model(name)).cloned().collect::<Vec<_>>();
    match (contents_of(dir, &of_model)?, trainer_folder::model_folder(dir, &names)) {
        (found, Some(folder)) if !found.is_named() => Ok(Contents::ModelFolder(folder)),
        (Contents::Unknown, _) => Ok(match contents_of(dir, &names)? {
            Contents::Unknown => Contents::Unknown,
            _ => Contents::NoModel(
                names.into_iter().filter(|name| trainer_folder::is_beside_model(name)).collect(),
            ),
        }),
        (found, _) => Ok(found),
    }
}

fn contents_of(dir: &Path, names: &[String]) -> Result<Contents, Error> {
    let has = |name: &str| names.iter().any(|found| found == name);
    let ending = |endings: &[&str]| -> Vec<String> {
        let is_one =
            |name: &&String| !name.starts_with('.') && endings.iter().any(|ending| name.ends_with(ending));
        names.iter().filter(is_one).cloned().collect()
    };
    let safetensors = ending(&[".safetensors"]);
    // Rank files beside a manifest are native even if the manifest is damaged; read as plain shards, they would be
    // unprotected.
    let is_of_rank = |name: &String| name.starts_with("shard-") || Attempt::named(name).is_some();
    if has(MANIFEST_FILE) && names.iter().any(is_of_rank) {
        return Ok(Contents::Native);
    }
    // If PyTorch wrote safetensors, its DCP metadata has nothing of use.
    let has_dcp_metadata = has(dcp::METADATA_FILE) || has(dcp::FIRST_RANK_METADATA_FILE);
    if has_dcp_metadata && (safetensors.is_empty() || !ending(&[".distcp"]).is_empty()) {
        return Ok(if megatron::is_at(dir, names) { Contents::Megatron } else { Contents::Dcp });
    }
    if has(INDEX_FILE) && !has(SINGLE_FILE) {
        return Ok(Contents::Index(dir.join(INDEX_FILE)));
    }
    if has(SINGLE_FILE) {
        return Ok(Contents::Safetensors(vec![SINGLE_FILE.to_owned()]));
    }
    if !safetensors.is_empty() {
        return Ok(Contents::Safetensors(safetensors));
    }
    if let Some(model) = TORCH_MODELS.into_iter().find(|name| has(name)) {
        return Ok(Contents::TorchFile(dir.join(model)));
    }
    if has(TORCH_INDEX) {
        return Ok(Contents::TorchIndex(dir.join(TORCH_INDEX)));
    }
    let mut torch_files = ending(&TORCH_ENDINGS);
    torch_files.retain(|name| {
        start_of(&dir.join(name))
            .is_ok_and(|start| matches!(kind_of(&start), FileKind::Zip | FileKind::Legacy))
    });
    Ok(match torch_files.as_slice() {
        [] => Contents::Unknown,
        [one] => Contents::TorchFile(dir.join(one)),
        _ => Contents::TorchFiles(torch_files),
    })
}
