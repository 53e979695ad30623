//! `fsdp doctor`, and missing devices.

use crate::support::Sandbox;

fn json(args: &str) -> serde_json::Value {
    serde_json::from_str(&Sandbox::new().succeed(args).stdout).unwrap()
}

#[test]
fn doctor_reports_libraries_and_usable_devices() {
    let report = json("doctor --json");
    let parts: Vec<&str> =
        report["findings"].as_array().unwrap().iter().map(|found| found["part"].as_str().unwrap()).collect();
    for part in ["driver", "NVRTC", "cuBLAS", "NCCL", "libtorch"] {
        assert!(parts.contains(&part), "{part} is not in {parts:?}");
    }
    let devices = report["devices"].as_array().unwrap();
    let names: Vec<&str> = devices.iter().map(|device| device["device"].as_str().unwrap()).collect();
    assert_eq!(names, ["cpu", "torch-cpu", "cuda", "xla"]);
    assert_eq!(devices[0]["usable"], true);
    assert_eq!(devices[1]["usable"], cfg!(feature = "torch"));
    let text = Sandbox::new().succeed("doctor").stdout;
    assert!(text.contains("run.device = \"cpu\": usable"), "{text}");
}

#[test]
fn missing_gpu_is_input_error() {
    let message = Sandbox::new().input_error("bench train --device cuda --steps 2 --warmup 0");
    let what = if cfg!(feature = "cuda") { "NVIDIA driver" } else { "--features cuda" };
    assert!(message.contains("device \"cuda\"") && message.contains(what), "{message}");
    assert!(!message.contains("run.device"), "there is no run file: {message}");
}
