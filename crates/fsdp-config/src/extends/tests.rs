use tempfile::TempDir;

use super::*;
use crate::Resolved;

const BASE: &str = r#"
[model]
path = "model"
[data]
train = ["a", "b"]
seq_len = 8
[train]
steps = 10
micro_batch_size = 1
global_batch_size = 4
optimizer = { name = "adamw", lr = 0.1, weight_decay = 0.3 }
[run]
out_dir = "runs/base"
"#;

fn files(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let file = dir.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    dir
}

fn load(dir: &TempDir, name: &str, overrides: &[&str]) -> Result<Resolved, ConfigError> {
    let overrides: Vec<String> = overrides.iter().map(|&argument| argument.to_owned()).collect();
    Resolved::load(&dir.path().join(name), &overrides).map(|loaded| loaded.config)
}

#[test]
fn extending_file_overrides_single_keys_and_replaces_lists() {
    let dir = files(&[
        ("base/base.toml", BASE),
        ("middle.toml", "extends = \"base/base.toml\"\n[train]\nsteps = 20\n[data]\ntrain = [\"c\"]"),
        ("run.toml", "extends = \"middle.toml\"\n[train]\noptimizer.lr = 0.5\n[run]\nranks = 2"),
    ]);
    let config = load(&dir, "run.toml", &["train.steps=30"]).unwrap();
    let plain = BASE
        .replace("steps = 10", "steps = 30")
        .replace("[\"a\", \"b\"]", "[\"c\"]")
        .replace("lr = 0.1", "lr = 0.5")
        .replace("[run]", "[run]\nranks = 2");
    assert_eq!(config, Resolved::parse(&plain, "plain", &[]).unwrap().config);
    assert!(!config.to_toml().contains(KEY));
}

#[test]
fn errors_name_file_that_set_key() {
    let with = |base: &str, run: &str| {
        let dir = files(&[("base.toml", &BASE.replace("seq_len = 8", base)), ("run.toml", run)]);
        let error = load(&dir, "run.toml", &[]).unwrap_err().to_string();
        error.replace(&format!("{}/", dir.path().display()), "")
    };
    let run = "extends = \"base.toml\"\n";
    assert!(with("seq_len = 0", run).starts_with("base.toml: `data.seq_len` is 0"));
    assert!(
        with("seq_len = 0", &format!("{run}[data]\nseq_len = -1"))
            .starts_with("run.toml: `data.seq_len` is -1")
    );
    assert!(with("seq_length = 8", run).starts_with("base.toml: unknown key `data.seq_length`"));
    assert!(with("", run).starts_with("run.toml: `data.seq_len` is missing"));
}

#[test]
fn missing_invalid_or_circular_extends_is_rejected() {
    let refused = |texts: &[(&str, &str)]| {
        let dir = files(texts);
        let error = load(&dir, "run.toml", &[]).unwrap_err().to_string();
        error.replace(&format!("{}/", dir.path().display()), "")
    };
    assert!(refused(&[("run.toml", "extends = \"base.toml\"")]).starts_with("cannot read base.toml: "));
    let number = refused(&[("run.toml", "extends = 3")]);
    assert_eq!(number, "run.toml: `extends` is 3; it must be the path of a run file");
    let circle =
        refused(&[("run.toml", "extends = \"a/b.toml\""), ("a/b.toml", "extends = \"../run.toml\"")]);
    assert_eq!(circle, "a/b.toml: `extends` leads back to a/../run.toml; remove it from one of the files");
    assert!(refused(&[("run.toml", "extends = \"run.toml\"")]).contains("leads back to run.toml"));
    let inner = refused(&[("run.toml", "extends = \"b.toml\""), ("b.toml", "a = [")]);
    let expected =
        "b.toml: `extends` of run.toml names it, but it is not a run file (line 1: not valid TOML)";
    assert_eq!(inner, expected);
}

#[test]
fn base_that_is_no_run_file_is_not_quoted() {
    for (text, line) in [("root:x:0:0\nsecret", 1), ("a = 1\nb = \"secret", 2), ("[secret\n", 1)] {
        let dir = files(&[("run.toml", "extends = \"base\""), ("base", text)]);
        let error = load(&dir, "run.toml", &[]).unwrap_err().to_string();
        assert!(!error.contains("secret") && !error.contains("root"), "{error}");
        assert!(error.contains(&format!("not a run file (line {line}: ")), "{error}");
    }
}

#[test]
fn chain_of_files_is_bounded() {
    let chain = |count: usize| {
        let dir = files(&[(format!("{}.toml", count - 1).as_str(), BASE)]);
        for index in 0..count - 1 {
            fs::write(dir.path().join(format!("{index}.toml")), format!("extends = \"{}.toml\"", index + 1))
                .unwrap();
        }
        load(&dir, "0.toml", &[])
    };
    assert!(chain(FILES_MAX).is_ok());
    let error = chain(FILES_MAX + 1).unwrap_err().to_string();
    assert!(error.contains("more than 16 files") && error.contains("1.toml -> "), "{error}");
}
