//! With the feature `torch`: finds libtorch, compiles the shim against its headers and says where it lies.
//!
//! Only the CPU half of libtorch is linked, so that this builds, and runs, without CUDA. Crates that end in a binary
//! must set the run path themselves: they read the folder as `DEP_FSDP_CUDA_LIBTORCH_LIB`.

#[cfg(feature = "torch")]
use std::path::{Path, PathBuf};

/// The version of libtorch that the bindings are made for.
const TORCH_VERSION: &str = "2.11.0";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(not(feature = "torch"))]
    println!("cargo:rustc-env=FSDP_LIBTORCH_VERSION={TORCH_VERSION}");
    #[cfg(feature = "torch")]
    match libtorch() {
        Ok(libtorch) => build(&libtorch),
        Err(found) => {
            eprintln!("the feature `torch` needs libtorch {TORCH_VERSION}, but {found}");
            eprintln!();
            eprintln!(
                "  pip install torch=={TORCH_VERSION}        (in the environment of the `python3` on the PATH)"
            );
            eprintln!("  LIBTORCH_USE_PYTORCH=1 cargo build --features torch");
            eprintln!();
            eprintln!(
                "or set LIBTORCH to a folder with include/ and lib/, such as <site-packages>/torch. Without"
            );
            eprintln!("the feature everything but the devices \"torch-cpu\" and \"cuda\" builds and runs.");
            std::process::exit(1);
        }
    }
}

/// An installed libtorch.
#[cfg(feature = "torch")]
struct Libtorch {
    include: PathBuf,
    lib: PathBuf,
    version: String,
    cxx11_abi: String,
}

/// Finds libtorch as `torch-sys` does: by Python, by `LIBTORCH`, or in `/usr`.
#[cfg(feature = "torch")]
fn libtorch() -> Result<Libtorch, String> {
    let variable = |name: &str| {
        println!("cargo:rerun-if-env-changed={name}");
        std::env::var(name).ok()
    };
    let root = if variable("LIBTORCH_USE_PYTORCH").is_some() {
        folder_of_python()?
    } else if let Some(folder) = variable("LIBTORCH") {
        PathBuf::from(folder)
    } else if Path::new("/usr/lib/libtorch.so").exists() {
        PathBuf::from("/usr")
    } else {
        return Err(
            "neither LIBTORCH_USE_PYTORCH=1 nor LIBTORCH is set, and there is no /usr/lib/libtorch.so".into(),
        );
    };
    let (include, lib) = (root.join("include"), root.join("lib"));
    for needed in [include.join("ATen/ATen.h"), lib.join("libtorch_cpu.so"), lib.join("libc10.so")] {
        if !needed.exists() {
            return Err(format!("there is no {}", needed.display()));
        }
    }
    let bypass = variable("LIBTORCH_BYPASS_VERSION_CHECK").is_some();
    match version(&include) {
        Some(found) if found != TORCH_VERSION && !bypass => {
            Err(format!("{} holds version {found}", root.display()))
        }
        found => {
            let cxx11_abi = variable("LIBTORCH_CXX11_ABI").unwrap_or("1".into());
            Ok(Libtorch { include, lib, version: found.unwrap_or("unknown".into()), cxx11_abi })
        }
    }
}

/// The folder of Python's `torch`.
#[cfg(feature = "torch")]
fn folder_of_python() -> Result<PathBuf, String> {
    let python = if std::env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
    let script = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')";
    let output = std::process::Command::new(python).args(["-c", script]).output();
    let output = output.map_err(|error| format!("`{python}` cannot be run: {error}"))?;
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if folder.is_empty() {
        return Err(format!("the `{python}` on the PATH has no module `torch`"));
    }
    Ok(PathBuf::from(folder))
}

/// The version that the headers name.
#[cfg(feature = "torch")]
fn version(include: &Path) -> Option<String> {
    let header = include.join("torch/csrc/api/include/torch/version.h");
    let installed = include.join("torch/headeronly/version.h");
    let text =
        [header, installed].iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect::<String>();
    let number = |name: &str| {
        let define = format!("#define TORCH_VERSION_{name} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&define))?;
        Some(line.trim().to_owned())
    };
    Some([number("MAJOR")?, number("MINOR")?, number("PATCH")?].join("."))
}

#[cfg(feature = "torch")]
fn build(libtorch: &Libtorch) {
    println!("cargo:rerun-if-changed=shim/shim.cpp");
    println!("cargo:rerun-if-changed=shim/shim.h");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        // Loops over operands: too slow without, in development builds too.
        .opt_level(3)
        .include(&libtorch.include)
        .include(libtorch.include.join("torch/csrc/api/include"))
        .define("_GLIBCXX_USE_CXX11_ABI", libtorch.cxx11_abi.as_str())
        // libtorch's headers are not free of warnings.
        .flag("-isystem")
        .flag(libtorch.include.display().to_string())
        .flag_if_supported("-fopenmp")
        .warnings(false)
        .file("shim/shim.cpp")
        .compile("fsdp_torch_shim");
    let lib = libtorch.lib.display();
    println!("cargo:rustc-link-search=native={lib}");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    // For the tests of this crate.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    println!("cargo:libtorch_lib={lib}");
    println!("cargo:rustc-env=FSDP_LIBTORCH_VERSION={}", libtorch.version);
}
