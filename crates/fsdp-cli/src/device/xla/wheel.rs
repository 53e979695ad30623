//! Finds plugins installed by Python packages, by a keyword for each kind.

use std::path::{Path, PathBuf};

use fsdp_xla::XlaError;

use crate::python::package_folders;

/// A keyword, the package to install, and the libraries that such packages contain, the preferred one first.
const KNOWN: [(&str, &str, &[&str]); 3] = [
    ("cpu", "lammps-jax-pjrt-cpu", &["lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so"]),
    ("tpu", "libtpu", &["libtpu/libtpu.so"]),
    (
        "cuda",
        "jax-cuda12-pjrt",
        &["jax_plugins/xla_cuda13/xla_cuda_plugin.so", "jax_plugins/xla_cuda12/xla_cuda_plugin.so"],
    ),
];

/// Resolves a path, or a keyword (`"cpu"`, `"tpu"`, `"cuda"`): the library of a Python package, installed for a Python
/// on `PATH` or for this user. A file of the current folder may be named alone: the system's loader looks for names
/// without a folder elsewhere.
///
/// # Errors
/// [`XlaError::Unusable`]: no package has installed one.
pub(crate) fn plugin_named(name: &str) -> Result<PathBuf, XlaError> {
    let Some(&(keyword, package, libraries)) = KNOWN.iter().find(|(keyword, ..)| *keyword == name) else {
        let is_here = !name.contains('/') && Path::new(name).is_file();
        return Ok(if is_here { Path::new(".").join(name) } else { name.into() });
    };
    let prefixes = prefixes();
    let found = libraries.iter().find_map(|library| installed(&prefixes, library));
    found.ok_or_else(|| {
        let folders: Vec<String> = prefixes.iter().map(|folder| folder.display().to_string()).collect();
        XlaError::Unusable(format!(
            "no Python package has a PJRT plugin for \"{keyword}\", below {}: `pip install {package}`, or name the plugin's \
             shared library",
            folders.join(", ")
        ))
    })
}

/// The plugins installed by packages, with their keywords.
pub(crate) fn installed_plugins() -> Vec<(&'static str, PathBuf)> {
    let keywords = KNOWN.iter().map(|(keyword, ..)| *keyword);
    keywords.filter_map(|keyword| Some((keyword, plugin_named(keyword).ok()?))).collect()
}

/// The prefixes where a Python may be installed, each once.
fn prefixes() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let of_path = std::env::split_paths(&path).filter_map(|bin| Some(bin.parent()?.to_owned()));
    let of_user = std::env::home_dir().map(|home| home.join(".local"));
    let mut prefixes: Vec<PathBuf> = Vec::new();
    for prefix in of_path.chain(of_user).filter(|prefix| prefix.is_absolute()) {
        if !prefixes.contains(&prefix) {
            prefixes.push(prefix);
        }
    }
    prefixes
}

/// Finds a library among the packages of these Pythons.
fn installed(prefixes: &[PathBuf], library: &str) -> Option<PathBuf> {
    prefixes
        .iter()
        .flat_map(|prefix| package_folders(prefix))
        .map(|folder| folder.join(library))
        .find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn plugin_library_is_found_in_any_python_prefix() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        let folder = second.join("lib/python3.12/site-packages/libtpu");
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(first.join("lib/python3.11/site-packages")).unwrap();
        assert_eq!(installed(&[first.clone(), second.clone()], "libtpu/libtpu.so"), None);
        fs::write(folder.join("libtpu.so"), "").unwrap();
        assert_eq!(installed(&[first, second], "libtpu/libtpu.so"), Some(folder.join("libtpu.so")));
    }

    #[test]
    fn path_resolves_to_itself() {
        assert_eq!(plugin_named("./tpu").unwrap(), PathBuf::from("./tpu"));
        assert_eq!(plugin_named("libnowhere.so").unwrap(), PathBuf::from("libnowhere.so"));
    }

    #[test]
    fn file_in_working_folder_is_used_directly() {
        assert_eq!(plugin_named("Cargo.toml").unwrap(), PathBuf::from("./Cargo.toml"));
    }
}
