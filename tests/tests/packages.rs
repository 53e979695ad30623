//! What the packages say of themselves on crates.io, docs.rs and PyPI.

use std::fs;
use std::path::{Path, PathBuf};

use toml::Table;

/// What the documentation of every crate says that is only a part of another one's.
const PART: &str = "//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version \
                    may change it.\n";
/// Crates that users name.
const FOR_USERS: [&str; 2] = ["fsdp", "fsdp-cli"];
/// Features without documentation of their own, or that docs.rs cannot build: it has no libtorch.
const WITHOUT_PAGES: [&str; 5] = ["bench", "cuda", "default", "gpu-tests", "torch"];

/// Returns all packages: the folder, and what the manifest says.
fn packages() -> Vec<(PathBuf, Table)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let members = ["crates", "tools"].map(|folder| fs::read_dir(root.join(folder)).unwrap());
    let members = members.into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = members.chain([root.join("tests")]).collect();
    folders.sort();
    let manifest = |folder: &PathBuf| fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse().unwrap();
    folders.into_iter().map(|folder| (folder.clone(), manifest(&folder))).collect()
}

fn name(manifest: &Table) -> &str {
    manifest["package"]["name"].as_str().unwrap()
}

#[test]
fn parts_say_what_they_are_a_part_of() {
    let mut seen = 0;
    for (folder, manifest) in packages() {
        let library = folder.join("src/lib.rs");
        if manifest["package"].get("publish").is_none() && library.exists() {
            let says = fs::read_to_string(library).unwrap().contains(PART);
            assert_eq!(says, !FOR_USERS.contains(&name(&manifest)), "{}", name(&manifest));
            seen += 1;
        }
    }
    assert!(seen > 5, "{seen} libraries were found");
}

#[test]
fn pages_on_docs_rs_have_the_features() {
    for (folder, manifest) in packages() {
        let features = manifest.get("features").and_then(|features| features.as_table());
        let with_pages: Vec<&str> = features
            .into_iter()
            .flat_map(|features| features.keys().map(String::as_str))
            .filter(|feature| !WITHOUT_PAGES.contains(feature))
            .collect();
        if folder.join("src/lib.rs").exists() && !with_pages.is_empty() {
            let listed = &manifest["package"]["metadata"]["docs"]["rs"]["features"];
            assert_eq!(listed, &toml::Value::from(with_pages), "{}", name(&manifest));
        }
    }
}

#[test]
fn all_but_tests_and_tools_are_published() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    let workspace: Table = fs::read_to_string(workspace).unwrap().parse().unwrap();
    let has_repository = workspace["workspace"]["package"].get("repository").is_some();
    for (folder, manifest) in packages() {
        let package = manifest["package"].as_table().unwrap();
        let is_crate = folder.parent().is_some_and(|parent| parent.ends_with("crates"));
        assert_eq!(package.get("publish"), (!is_crate).then_some(&false.into()), "{package}");
        for key in ["description", "license", "keywords", "categories", "documentation"] {
            assert!(
                package.contains_key(key) || package.contains_key("publish"),
                "{} lacks {key}",
                name(&manifest)
            );
        }
        // As soon as the project has an address.
        let is_needed = has_repository && !package.contains_key("publish");
        assert_eq!(package.contains_key("repository"), is_needed, "repository of {}", name(&manifest));
    }
}

#[test]
fn published_packages_have_a_readme_and_the_licenses() {
    let mut seen = 0;
    for (folder, manifest) in packages() {
        if manifest["package"].get("publish").is_some() {
            continue;
        }
        let readme = fs::read_to_string(folder.join("README.md")).unwrap_or_default();
        assert!(readme.starts_with(&format!("# {}\n", name(&manifest))), "{}: {readme:?}", name(&manifest));
        let is_part = readme.contains("without a promise of stability");
        assert_eq!(is_part, !FOR_USERS.contains(&name(&manifest)), "{}", name(&manifest));
        // Those of the repository, which `cargo package` follows links to.
        for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
            let text = |folder: &Path| fs::read_to_string(folder.join(license)).unwrap_or_default();
            assert!(!text(&folder).is_empty(), "{} has no {license}", name(&manifest));
            assert_eq!(text(&folder), text(&folder.join("../..")), "{license} of {}", name(&manifest));
        }
        // Found by Cargo unless the manifest says otherwise.
        for key in ["readme", "include", "exclude"] {
            assert!(manifest["package"].get(key).is_none(), "{} has {key}", name(&manifest));
        }
        seen += 1;
    }
    assert!(seen > 5, "{seen} packages were found");
}

#[test]
fn first_pages_in_registries_have_no_relative_links() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let project = fs::read_to_string(root.join("pyproject.toml")).unwrap().parse::<Table>().unwrap();
    let of_wheel = root.join(project["project"]["readme"].as_str().unwrap());
    let pages = packages().into_iter().map(|(folder, _)| folder.join("README.md")).chain([of_wheel]);
    for page in pages.filter(|page| page.exists()) {
        let text = fs::read_to_string(&page).unwrap();
        for target in text.split("](").skip(1) {
            assert!(target.starts_with("https://"), "{}: {target}", page.display());
        }
    }
}
