//! With libtorch, the run path under which the binary finds it: that of its build, which `fsdp-cuda` says.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(folder) = std::env::var("DEP_FSDP_CUDA_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
