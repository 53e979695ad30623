//! The run-time compiler of kernels.

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::{result, sys};

use crate::error::DeviceError;

/// Compiles a source for an architecture into an image that the driver loads.
///
/// `--fmad=false`: a product and a sum are fused only where a kernel says so, so that kernels round as the host's
/// kernels do.
pub(crate) fn compile(
    file: &str,
    source: &str,
    arch: &str,
    macros: &[String],
) -> Result<Vec<u8>, DeviceError> {
    library()?;
    let fail = |log: String| DeviceError::Compile { file: file.to_owned(), arch: arch.to_owned(), log };
    let code = |error: result::NvrtcError| fail(format!("{error}"));
    let source = CString::new(source).map_err(|error| fail(error.to_string()))?;
    let name = CString::new(file).map_err(|error| fail(error.to_string()))?;
    let mut options = vec![format!("--gpu-architecture={arch}")];
    // Closures have no place for an annotation: everything is device code.
    options.extend(["--std=c++17", "--fmad=false", "--device-as-default-execution-space"].map(str::to_owned));
    options.extend(macros.iter().map(|definition| format!("--define-macro={definition}")));
    let program = result::create_program(&source, Some(&name)).map_err(code)?;
    // SAFETY: the program was created above and is destroyed below, once; its source outlives it.
    let compiled = unsafe { result::compile_program(program, &options) };
    let image = match compiled {
        Ok(()) => image(program).map_err(code),
        Err(error) => Err(fail(format!("{error}\n{}", log(program)))),
    };
    // SAFETY: as above; it is not used any more.
    let destroyed = unsafe { result::destroy_program(program) };
    destroyed.map_err(code).and(image)
}

/// Looks for the compiler; `cudarc` would panic without it.
fn library() -> Result<(), DeviceError> {
    // SAFETY: this only asks the loader for the library, whose initialisers are NVIDIA's.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    let tried = cudarc::get_lib_name_candidates("nvrtc");
    let remedy = "it comes with the CUDA toolkit and with the wheel nvidia-cuda-nvrtc: install one of them";
    Err(DeviceError::Library { library: "the kernel compiler (libnvrtc)", tried, remedy })
}

fn image(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut bytes = 0;
    // SAFETY: the program is live and was compiled; `bytes` outlives the call.
    unsafe { sys::nvrtcGetCUBINSize(program, &raw mut bytes) }.result()?;
    let mut image = vec![0_u8; bytes];
    // SAFETY: as above, and the image has as many bytes as the compiler said.
    unsafe { sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast::<c_char>()) }.result()?;
    Ok(image)
}

fn log(program: sys::nvrtcProgram) -> String {
    // SAFETY: the program is live.
    let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
    let bytes: Vec<u8> = log.into_iter().map(|byte| byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|log| log.to_string_lossy().into_owned()).unwrap_or_default()
}
