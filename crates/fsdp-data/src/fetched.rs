//! Data in object stores: files are copied to this machine before they are read.
//!
//! Training reads samples in random order, which is slow and costly on a store, and the files are memory-mapped, which
//! requires a local disk. So each file is copied once per machine, under a name derived from its URL and version, where
//! later runs find it. Weights are not copied: each rank reads its rows once.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use fsdp_ckpt::{is_url, objects};
use fsdp_config::DataConfig;
use fsdp_core::Digest;
use tempfile::NamedTempFile;

use crate::error::DataError;

/// The environment variable that names the folder of copies.
const FOLDER: &str = "FSDP_CACHE_DIR";

/// Files next to a tokenizer that belong to it.
const TOKENIZER_COMPANIONS: [&str; 3] =
    ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];

/// An object to copy.
struct Object {
    url: PathBuf,
    name: String,
    version: u64,
}

/// Returns the same data with all URLs replaced by copies on this machine, which are made if they do not exist.
///
/// # Errors
/// [`DataError::Store`] if the store does not have them, [`DataError::Copy`] if they cannot be written here.
pub(super) fn fetched(data: &DataConfig) -> Result<DataConfig, DataError> {
    let mut local = data.clone();
    let fetch = |path: &mut String, companions: &[&str]| -> Result<(), DataError> {
        if is_url(&path) {
            *path = copy_of(Path::new(path), &folder(), companions)?.to_string_lossy().into_owned();
        }
        Ok(())
    };
    let sources = local.source.iter_mut().flat_map(|source| &mut source.path);
    let eval = local.eval.iter_mut().flat_map(|set| &mut set.paths);
    let paths = local.train.iter_mut().chain(sources).chain(eval).chain(&mut local.chat_template);
    paths.into_iter().try_for_each(|path| fetch(path, &[]))?;
    fetch(&mut local.tokenizer, &TOKENIZER_COMPANIONS)?;
    Ok(local)
}

/// Returns the folder for copies.
fn folder() -> PathBuf {
    let configured = std::env::var_os(FOLDER).map(PathBuf::from);
    let default = || {
        let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or(home).map(|cache| cache.join("fsdp"))
    };
    configured.or_else(default).unwrap_or_else(|| std::env::temp_dir().join("fsdp"))
}

/// Returns the copy of an object, together with those of `companions` that exist next to it, or of all objects
/// directly below a URL.
fn copy_of(url: &Path, folder: &Path, companions: &[&str]) -> Result<PathBuf, DataError> {
    let object = |url: PathBuf| -> Result<Option<Object>, DataError> {
        let name = url.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(objects::version(&url)?.map(|version| Object { url, name, version }))
    };
    let (is_object, found) = match object(url.to_owned())? {
        Some(single) => {
            let companions = companions.iter().map(|name| object(url.with_file_name(name)));
            let companions = companions.filter_map(Result::transpose);
            (true, std::iter::once(Ok(single)).chain(companions).collect::<Result<Vec<_>, _>>()?)
        }
        None => {
            let inside = objects::names(url)?.into_iter().map(|name| object(url.join(name)));
            (false, inside.filter_map(Result::transpose).collect::<Result<Vec<_>, _>>()?)
        }
    };
    if found.is_empty() {
        let (file, source) = (url.to_owned(), io::ErrorKind::NotFound.into());
        return Err(DataError::Read { key: "[data]", file, source });
    }
    let facts: Vec<(String, u64)> =
        found.iter().map(|object| (object.url.display().to_string(), object.version)).collect();
    let [high, low] = Digest::of(&facts).words();
    let dir = folder.join(format!("{high:016x}{low:016x}"));
    fs::create_dir_all(&dir).map_err(copying("create", &dir))?;
    // The first process on a machine copies, the others wait.
    let lock = dir.with_extension("lock");
    let locked = File::create(&lock).and_then(|file| file.lock().map(|()| file));
    let _locked = locked.map_err(copying("lock", &lock))?;
    for Object { url, name, .. } in &found {
        let file = dir.join(name);
        if !file.exists() {
            tracing::info!("copying {} to {}", url.display(), file.display());
            copy(url, &file)?;
        }
    }
    Ok(if is_object { dir.join(&found[0].name) } else { dir })
}

/// Wraps an I/O error, for use with `map_err`.
fn copying(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DataError {
    let path = path.to_owned();
    move |source| DataError::Copy { action, path, source }
}

/// Copies an object; the file appears only once it is complete.
fn copy(url: &Path, file: &Path) -> Result<(), DataError> {
    let failed = |action| copying(action, file);
    let temporary_folder = file.parent().and_then(Path::parent).unwrap_or(Path::new("."));
    let mut temporary = NamedTempFile::new_in(temporary_folder).map_err(failed("create"))?;
    objects::read_to(url, temporary.as_file_mut())?;
    temporary.as_file().sync_all().map_err(failed("sync"))?;
    temporary.persist(file).map_err(|error| failed("name")(error.error))?;
    Ok(())
}

#[cfg(feature = "object-store")]
#[cfg(test)]
mod tests {
    use fsdp_core::FailureKind;

    use super::*;

    fn put(url: &str, text: &str) {
        objects::write(Path::new(url), text.as_bytes()).unwrap();
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn object_is_copied_once_and_again_after_change() {
        let dir = tempfile::tempdir().unwrap();
        let url = "memory://fetched/one/data.txt";
        put(url, "first");
        let copy = copy_of(Path::new(url), dir.path(), &[]).unwrap();
        assert_eq!((copy.file_name().unwrap().to_str(), read(&copy).as_str()), (Some("data.txt"), "first"));
        // An existing copy is used, not made again.
        fs::write(&copy, "here").unwrap();
        assert_eq!(read(&copy_of(Path::new(url), dir.path(), &[]).unwrap()), "here");
        put(url, "second");
        let other = copy_of(Path::new(url), dir.path(), &[]).unwrap();
        assert_ne!(other, copy);
        assert_eq!(read(&other), "second");
    }

    #[test]
    fn what_cannot_be_copied_names_what_to_change() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |url: &str, folder: &Path| {
            let error = copy_of(Path::new(url), folder, &[]).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Input, "{error}");
            error.to_string()
        };
        let missing = refused("memory://fetched/none/data.txt", dir.path());
        assert!(missing.ends_with("check the paths of [data]"), "{missing}");
        let url = "memory://fetched/kept/data.txt";
        put(url, "text");
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let no_folder = refused(url, &file);
        assert!(
            no_folder.ends_with("set FSDP_CACHE_DIR to another folder for copies of data"),
            "{no_folder}"
        );
    }

    #[test]
    fn tokenizer_companion_files_are_copied_with_it() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
            put(&format!("memory://fetched/beside/{name}"), name);
        }
        let url = Path::new("memory://fetched/beside/tokenizer.json");
        let copy = copy_of(url, dir.path(), &TOKENIZER_COMPANIONS).unwrap();
        assert_eq!(read(&copy), "tokenizer.json");
        assert_eq!(read(&copy.with_file_name("tokenizer_config.json")), "tokenizer_config.json");
        assert!(!copy.with_file_name("config.json").exists());
    }

    #[test]
    fn objects_directly_below_url_are_copied_to_folder() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.txt", "b.txt", "deep/c.txt"] {
            put(&format!("memory://fetched/many/{name}"), name);
        }
        let copy = copy_of(Path::new("memory://fetched/many"), dir.path(), &[]).unwrap();
        let mut names: Vec<_> =
            fs::read_dir(&copy).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["a.txt", "b.txt"]);
        assert_eq!(read(&copy.join("b.txt")), "b.txt");
    }
}
