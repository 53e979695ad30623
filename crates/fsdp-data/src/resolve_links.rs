//! Resolves links in paths that may not exist yet.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// Returns the absolute path that `path` leads to, with links resolved as far as it exists. If nothing can be resolved,
/// returns `path` unchanged.
pub fn resolve_links(path: &Path) -> PathBuf {
    for existing in path.ancestors() {
        let existing_dir = if existing.as_os_str().is_empty() { Path::new(".") } else { existing };
        let Ok(mut resolved) = fs::canonicalize(existing_dir) else { continue };
        let rest = path.strip_prefix(existing).unwrap_or(Path::new(""));
        for component in rest.components() {
            match component {
                Component::ParentDir => drop(resolved.pop()),
                Component::Normal(name) => resolved.push(name),
                _ => {}
            }
        }
        return resolved;
    }
    path.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_resolved_in_existing_part_of_path() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(root.join("real")).unwrap();
        std::os::unix::fs::symlink("real", root.join("link")).unwrap();
        assert_eq!(resolve_links(&root.join("link")), root.join("real"));
        assert_eq!(resolve_links(&root.join("link/new/out")), root.join("real/new/out"));
        assert_eq!(resolve_links(&root.join("link/new/../out")), root.join("real/out"));
    }

    #[test]
    fn relative_paths_resolve_from_current_folder() {
        let here = fs::canonicalize(".").unwrap();
        assert_eq!(resolve_links(Path::new("not-there/out")), here.join("not-there/out"));
        assert_eq!(resolve_links(Path::new(".")), here);
    }
}
