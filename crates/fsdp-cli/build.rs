//! With libtorch: the run path under which the binary finds it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Said by `fsdp-cuda`, when it is built with libtorch.
    if let Ok(folder) = std::env::var("DEP_FSDP_CUDA_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
