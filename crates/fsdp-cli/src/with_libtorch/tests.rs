use std::fs;

use super::*;

/// An environment of Python: the folder of its packages is `packages`, below the prefix.
struct Environment {
    prefix: tempfile::TempDir,
    packages: PathBuf,
}

impl Environment {
    /// With fsdp-cuda of this version.
    fn new(packages: &str) -> Self {
        let prefix = tempfile::tempdir().expect("a folder");
        let packages = prefix.path().join(packages);
        let environment = Self { prefix, packages };
        environment.write(PROGRAM);
        fs::create_dir(environment.packages.join(format!("fsdp_cuda-{VERSION}.dist-info"))).expect("room");
        environment
    }

    fn write(&self, name: &str) {
        let file = self.packages.join(name);
        fs::create_dir_all(file.parent().expect("a folder")).expect("room");
        fs::write(file, "").expect("room");
    }

    /// Installs torch, which states its version.
    fn install_torch(&self, version: &str) {
        self.write("torch/lib/libtorch_cpu.so");
        let text = format!("from typing import Optional\n__version__ = '{version}'\n");
        fs::write(self.packages.join("torch/version.py"), text).expect("room");
    }

    fn find_with(&self, library_path: Option<&OsStr>) -> Option<Result<PathBuf, Unfit>> {
        find(&self.prefix.path().join("bin/fsdp"), library_path)
    }

    fn find(&self) -> Option<Result<PathBuf, Unfit>> {
        self.find_with(None)
    }

    /// Why the program is unfit.
    fn message(&self) -> String {
        self.find().expect("it is installed").expect_err("it is unfit").to_string()
    }
}

#[test]
fn program_is_found_in_every_layout() {
    for packages in [
        "lib/python3.11/site-packages",
        "lib64/python3.14/site-packages",
        "lib/python3.14t/site-packages",
        "lib/python3.12/dist-packages",
        "lib/python3/dist-packages",
        "",
    ] {
        let environment = Environment::new(packages);
        environment.install_torch(&format!("{TORCH}+cu130"));
        let program = environment.find().expect("it is installed").unwrap_or_else(|why| panic!("{why}"));
        assert_eq!(program, environment.packages.join("fsdp_cuda/fsdp"), "{packages}");
    }
}

#[test]
fn nothing_is_found_where_nothing_is_installed() {
    let empty = tempfile::tempdir().expect("a folder");
    assert!(find(&empty.path().join("bin/fsdp"), None).is_none());
    fs::create_dir_all(empty.path().join("lib/python3.11/site-packages/torch/lib")).expect("room");
    assert!(find(&empty.path().join("bin/fsdp"), None).is_none(), "torch alone is not enough");
    assert!(find(Path::new("fsdp"), None).is_none(), "a path without folders");
}

#[test]
fn missing_torch_is_named_with_the_way_out() {
    let environment = Environment::new("lib/python3.11/site-packages");
    let message = environment.message();
    let packages = environment.packages.display();
    assert!(
        message.contains(&format!("there is none in {packages}: pip install torch=={TORCH}")),
        "{message}"
    );
}

#[test]
fn other_torch_is_named_with_its_file() {
    for version in ["2.10.0+cu130", "2.11.1", "3.0.0a0"] {
        let environment = Environment::new("lib/python3.11/site-packages");
        environment.install_torch(version);
        let message = environment.message();
        let expected = format!("version.py says {version}: pip install torch=={TORCH}");
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn fsdp_cuda_of_another_version_is_refused() {
    let environment = Environment::new("lib/python3.11/site-packages");
    environment.install_torch(TORCH);
    let stated = environment.packages.join(format!("fsdp_cuda-{VERSION}.dist-info"));
    fs::rename(stated, environment.packages.join("fsdp_cuda-0.0.1.dist-info")).expect("room");
    let message = environment.message();
    assert!(message.contains(&format!("pip install fsdp-cuda=={VERSION}")), "{message}");
}

/// As the loader does.
#[test]
fn library_path_comes_before_torch_of_the_packages() {
    let environment = Environment::new("lib/python3.11/site-packages");
    let other = Environment::new("elsewhere");
    other.install_torch(TORCH);
    let path = format!("/nonexistent:{}", other.packages.join("torch/lib").display());
    let find = || environment.find_with(Some(OsStr::new(&path))).expect("it is installed");
    assert!(find().is_ok());
    environment.install_torch("2.10.0");
    assert!(find().is_ok());
    other.install_torch("2.9.1");
    let why = find().expect_err("the first one is unfit").to_string();
    assert!(why.contains("elsewhere/torch/version.py says 2.9.1"), "{why}");
}

#[test]
fn one_fit_python_of_several_suffices() {
    let environment = Environment::new("lib/python3.11/site-packages");
    environment.install_torch("2.10.0");
    for (python, has_torch) in [("python3.10", false), ("python3.12", true), ("python3.13", false)] {
        let packages = environment.prefix.path().join("lib").join(python).join("site-packages");
        let other = Environment { prefix: tempfile::tempdir().expect("a folder"), packages };
        other.write(PROGRAM);
        fs::create_dir(other.packages.join(format!("fsdp_cuda-{VERSION}.dist-info"))).expect("room");
        if has_torch {
            other.install_torch(TORCH);
        }
    }
    let program = environment.find().expect("it is installed").expect("one is fit");
    assert!(program.ends_with("lib/python3.12/site-packages/fsdp_cuda/fsdp"), "{}", program.display());
}
