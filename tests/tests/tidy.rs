//! Code conventions that a machine can check: dependencies between crates, what core must not use, lengths of files and
//! functions, and formatting.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Maximum number of lines of a file without its tests.
const FILE_LINES_MAX: usize = 500;

/// Maximum number of lines of a function, from its signature to its closing brace.
const FUNCTION_LINES_MAX: usize = 70;

/// Every crate with the workspace crates it may depend on.
const LAYERS: [(&str, &[&str]); 14] = [
    ("fsdp-core", &[]),
    ("fsdp-comm", &["fsdp-core"]),
    ("fsdp-sim", &["fsdp-core", "fsdp-comm"]),
    ("fsdp-mpi", &["fsdp-core", "fsdp-comm"]),
    ("fsdp-nn", &["fsdp-core"]),
    ("fsdp-plan", &["fsdp-core", "fsdp-nn", "fsdp-sim"]),
    ("fsdp-cuda", &["fsdp-core", "fsdp-comm", "fsdp-nn"]),
    ("fsdp-xla", &["fsdp-core", "fsdp-comm", "fsdp-nn", "fsdp-sim"]),
    ("fsdp-ckpt", &["fsdp-core"]),
    ("fsdp-config", &["fsdp-core", "fsdp-nn", "fsdp-ckpt"]),
    ("fsdp-data", &["fsdp-core", "fsdp-nn", "fsdp-ckpt", "fsdp-config"]),
    ("fsdp-train", &["fsdp-core", "fsdp-comm", "fsdp-nn", "fsdp-ckpt", "fsdp-config", "fsdp-data"]),
    (
        "fsdp",
        &[
            "fsdp-core",
            "fsdp-comm",
            "fsdp-nn",
            "fsdp-sim",
            "fsdp-ckpt",
            "fsdp-config",
            "fsdp-data",
            "fsdp-train",
        ],
    ),
    (
        "fsdp-cli",
        &[
            "fsdp-core",
            "fsdp-comm",
            "fsdp-mpi",
            "fsdp-nn",
            "fsdp-plan",
            "fsdp-sim",
            "fsdp-cuda",
            "fsdp-xla",
            "fsdp-ckpt",
            "fsdp-config",
            "fsdp-data",
            "fsdp-train",
        ],
    ),
];

/// What core must not use: side effects, and iteration in an unspecified order.
const FORBIDDEN_IN_CORE: [&str; 8] =
    ["std::thread", "std::time", "std::env", "std::fs", "std::net", "std::process", "HashMap", "HashSet"];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates")
}

/// Returns all Rust files below a folder, except tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            found.extend(sources(&path));
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(path);
        }
    }
    found
}

/// Returns all Rust files of crates and tools, except tests.
fn all_sources() -> Vec<PathBuf> {
    [crates(), crates().join("../tools")].iter().flat_map(|folder| sources(folder)).collect()
}

/// Returns the part of a file before its test module.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text)
}

#[test]
fn crates_depend_only_on_lower_layers() {
    let mut seen = 0;
    for entry in fs::read_dir(crates()).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let allowed = LAYERS.iter().find(|(layer, _)| *layer == name).expect("every crate has a layer").1;
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let dependencies = manifest.split("[dependencies]").nth(1).unwrap().split("\n[").next().unwrap();
        for line in dependencies.lines().filter(|line| line.starts_with("fsdp-")) {
            let dependency = line.split(['.', ' ', '=']).next().unwrap();
            assert!(allowed.contains(&dependency), "{name} must not rest on {dependency}");
        }
        seen += 1;
    }
    assert_eq!(seen, LAYERS.len());
}

#[test]
fn core_has_no_side_effects_or_unordered_iteration() {
    for path in sources(&crates().join("fsdp-core/src")) {
        let text = fs::read_to_string(&path).unwrap();
        for word in FORBIDDEN_IN_CORE {
            assert!(!without_tests(&text).contains(word), "{} uses {word}", path.display());
        }
    }
}

/// The parts of core that may depend on policies: their definition, the wrapping of units, the schedule compiler, and
/// errors. All other code works on schedules, regardless of the policies they were compiled from.
const WITH_POLICIES: [&str; 9] = [
    "error.rs",
    "plan.rs",
    "program/calls.rs",
    "schedule/compile",
    "schedule/live.rs",
    "schedule/order.rs",
    "schedule/policy.rs",
    "testing.rs",
    "wrap.rs",
];

#[test]
fn only_compiler_uses_policies() {
    let core = crates().join("fsdp-core/src");
    let mut seen = 0;
    for path in sources(&core) {
        let name = path.strip_prefix(&core).unwrap().to_string_lossy().into_owned();
        if WITH_POLICIES.iter().any(|room| name.starts_with(room)) || name.contains("tests") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        // The schedule module's re-exports are not uses.
        let code = without_tests(&text).lines().filter(|line| !line.starts_with("pub use"));
        for line in code.filter(|line| !line.trim_start().starts_with("//")) {
            let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
            let policies =
                ["Policy", "policy", "Offload", "Accumulation", "AccumulationOrder", "Checkpointing"];
            let is_module = line == "mod policy;";
            let knows = words.any(|word| policies.contains(&word)) || line.contains(" Reshard::");
            assert!(is_module || !knows, "{} asks for a policy: {line}", path.display());
        }
        seen += 1;
    }
    assert!(seen > 15, "{seen} files were found");
}

#[test]
fn files_are_short_documented_and_without_todos() {
    for path in all_sources() {
        let text = fs::read_to_string(&path).unwrap();
        let lines = without_tests(&text).lines().count();
        assert!(lines <= FILE_LINES_MAX, "{} has {lines} lines: split it by concept", path.display());
        for word in [concat!("todo", "!("), concat!("unimplemented", "!("), concat!("#[ig", "nore")] {
            assert!(!text.contains(word), "{} contains {word}", path.display());
        }
        assert!(
            text.starts_with("//!") || path.ends_with("build.rs"),
            "{} says not what it is",
            path.display()
        );
    }
}

/// Returns the first line of every function with its number of lines. A function ends at the brace below its first
/// character, where rustfmt puts it.
fn functions(text: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let starts = |line: &str| {
        let mut words = line.split_whitespace();
        let is_modifier = |word: &str| {
            word.starts_with("pub") || ["in", "const", "async", "unsafe", "extern"].contains(&word)
        };
        words.find(|word| !is_modifier(word)) == Some("fn") && !line.ends_with([';', '}'])
    };
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate().filter(|(_, line)| starts(line)) {
        let indent = &line[..line.len() - line.trim_start().len()];
        let ends_it = |rest: &str| rest == "}" || rest == ";" || rest.starts_with(')') && rest.ends_with(';');
        let ends = |line: &&str| line.strip_prefix(indent).is_some_and(ends_it);
        if let Some(len) = lines[at..].iter().position(ends) {
            found.push((*line, len + 1));
        }
    }
    found
}

#[test]
fn functions_are_short() {
    let sample = "fn one() {\n    1\n}\nimpl A {\n    pub(crate) const fn two(\n    ) {\n    }\n}\nfn x();\n";
    assert_eq!(functions(sample), [("fn one() {", 3), ("    pub(crate) const fn two(", 3)]);
    let mut seen = 0;
    for path in all_sources() {
        let text = fs::read_to_string(&path).unwrap();
        for (first, lines) in functions(&text) {
            let place = format!("{}: `{}`", path.display(), first.trim());
            assert!(lines <= FUNCTION_LINES_MAX, "{place} has {lines} lines: split it by concept");
            seen += 1;
        }
    }
    assert!(seen > 500, "{seen} functions were found");
}

/// Whether a word in backticks is the name of a test: at least three words.
fn is_test_name(word: &str) -> bool {
    word.matches('_').count() >= 2
        && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

#[test]
fn tests_named_in_parity_table_exist() {
    fn rust(folder: &Path, text: &mut String) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                rust(&path, text);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                text.push_str(&fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut code = String::new();
    [crates(), crates().join("../tests/tests")].iter().for_each(|folder| rust(folder, &mut code));
    let table = fs::read_to_string(crates().join("../docs/parity.md")).unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| "));
    let names: Vec<&str> =
        rows.flat_map(|row| row.split('`').skip(1).step_by(2)).filter(|word| is_test_name(word)).collect();
    for name in &names {
        assert!(
            code.contains(&format!("fn {name}(")),
            "docs/parity.md names the test `{name}`, which does not exist"
        );
    }
    assert!(names.len() > 100, "{} names were found", names.len());
}

/// Returns the names of the modules directly in a crate, of a folder or file each.
fn modules(crate_folder: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(crate_folder.join("src")).unwrap().map(|entry| entry.unwrap().path());
    let rust = names.filter(|path| path.is_dir() || path.extension().is_some_and(|end| end == "rs"));
    let stems = rust.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned());
    stems.filter(|name| name != "lib" && name != "tests").collect()
}

#[test]
fn code_map_names_every_module_and_no_other() {
    let text = fs::read_to_string(crates().join("../ARCHITECTURE.md")).unwrap();
    let map = text.split("## Code map").nth(1).unwrap().split("\n##").next().unwrap();
    let quoted =
        |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let mut named: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for row in map.lines().filter(|line| line.starts_with("| ") && line.contains('`')) {
        let cells: Vec<&str> = row.split(" | ").collect();
        let name = cells[0].trim_start_matches("| ");
        for module in quoted(cells[1]) {
            assert!(named.entry(name).or_default().insert(module.clone()), "{name}: {module} is named twice");
        }
        let folder = crates().join(format!("fsdp-{name}"));
        for path in quoted(cells[2]).iter().filter(|word| word.contains('/') && !word.contains('*')) {
            let exists = folder.join("src").join(path).exists() || folder.join(path).exists();
            assert!(exists, "ARCHITECTURE.md names {path} of fsdp-{name}, which does not exist");
        }
    }
    for (layer, _) in LAYERS {
        let there = modules(&crates().join(layer));
        let name = layer.trim_start_matches("fsdp-");
        assert_eq!(
            named.get(name).cloned().unwrap_or_default(),
            there,
            "the code map of ARCHITECTURE.md and the modules of {layer}"
        );
    }
}

#[test]
fn workspace_is_formatted() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let fmt = |args: &[&str]| Command::new(&cargo).arg("fmt").args(args).current_dir(crates()).output();
    if !fmt(&["--version"]).is_ok_and(|output| output.status.success()) {
        println!("skipped: rustfmt is not installed");
        return;
    }
    let output = fmt(&["--all", "--check"]).unwrap();
    assert!(output.status.success(), "run cargo fmt --all:\n{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn unsafe_code_is_confined_to_allowed_modules() {
    for path in all_sources() {
        let text = fs::read_to_string(&path).unwrap();
        let has_unsafe = text.lines().any(|line| {
            let code = line.trim_start();
            let unsafe_code = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe trait", "unsafe extern"];
            !code.starts_with("//") && unsafe_code.iter().any(|unsafe_code| code.contains(unsafe_code))
        });
        let may = path.ends_with("fsdp-nn/src/host/raw.rs")
            || path.ends_with("fsdp-data/src/mapped.rs")
            || path.ends_with("fsdp-cli/src/allocator.rs")
            || path.parent().is_some_and(|folder| {
                ["fsdp-cuda/src/ffi", "fsdp-mpi/src/ffi", "fsdp-xla/src/ffi"]
                    .iter()
                    .any(|ffi| folder.ends_with(ffi))
            });
        assert!(!has_unsafe || may, "{} is unsafe", path.display());
    }
}
