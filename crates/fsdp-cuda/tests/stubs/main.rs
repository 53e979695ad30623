//! Libraries that are not what their names say: a driver that lacks functions, and a second kernel compiler.
//!
//! A process has one driver and one compiler, so these tests need their own binary.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(unsafe_code, reason = "it opens the stand-in")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use fsdp_cuda::doctor::{Finding, Status, examine};
use fsdp_cuda::{CudaMemory, CudaOptions, load_compiler};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Compiles a library whose soname is its file name.
fn library(name: &str, source: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stubs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (file, text) = (folder.join(name), folder.join(format!("{name}.c")));
    std::fs::write(&text, source).unwrap();
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", &format!("-Wl,-soname,{name}"), "-o"]).arg(&file).arg(&text);
    let output = command.output().expect("a C compiler is there, because Rust links with it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    file
}

fn part(findings: &[Finding], name: &str) -> Finding {
    findings.iter().find(|finding| finding.part == name).expect("every part is told").clone()
}

#[test]
fn incomplete_driver_error_names_file_function_and_version() {
    compiler();
    // It reports a version that is new enough; without the check, the first call of a missing function would panic.
    let file = library("libcuda.so", "int cuDriverGetVersion(int *v) { *v = 13000; return 0; }");
    // SAFETY: the library was built from the line above and has no initializers.
    std::mem::forget(unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_GLOBAL) }.unwrap());
    let found = part(&examine(&[]), "driver");
    assert_eq!(found.status, Status::Unusable);
    assert_eq!(
        found.detail,
        format!(
            "{} has no function cuGetErrorName: it is not the NVIDIA driver for CUDA 12.8 or newer; install that, or \
             remove this file from the loader's search path",
            file.display()
        )
    );
    let error = CudaMemory::new(CudaOptions::new(0)).expect_err("there is no driver");
    assert!(error.to_string().contains("has no function cuGetErrorName"), "{error}");
}

#[test]
fn doctor_names_chosen_compiler() {
    let file = compiler();
    // This holds whatever else is installed, and wherever the doctor looks.
    let found = part(&examine(&[]), "NVRTC");
    assert_eq!((found.version.as_deref(), found.path.as_deref()), (Some("99.1"), Some(file)));
}

/// Returns the compiler of this process. Every test calls this first, because any lookup fixes the choice.
fn compiler() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let functions =
            ["GetErrorString", "CreateProgram", "CompileProgram", "DestroyProgram", "GetCUBINSize"];
        let more = ["GetCUBIN", "GetProgramLogSize", "GetProgramLog"];
        let stubs =
            functions.iter().chain(&more).map(|name| format!("int nvrtc{name}(void) {{ return 1; }}\n"));
        let version =
            "int nvrtcVersion(int *major, int *minor) { *major = 99; *minor = 1; return 0; }\n".to_owned();
        let file = library("libnvrtc.so.13", &stubs.chain([version]).collect::<String>());
        load_compiler(&[file.parent().unwrap().to_owned()]).unwrap();
        file
    })
}
