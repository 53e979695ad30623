//! `fsdp doctor`, `fsdp bench gpu`, and missing devices.

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
fn gpu_benchmark_report_is_consistent() {
    let report = json("bench gpu --model llama-tiny --device cpu --batch 2 --steps 4 --warmup 1 --json");
    let number = |key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key} in {report}"));
    assert_eq!(report["step_ms"].as_array().unwrap().len(), 4);
    assert_eq!(number("tokens_per_step"), 2.0 * 64.0);
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
    assert!(close(number("tokens_per_s"), number("tokens_per_step") / number("step_ms_mean") * 1e3));
    let flops = 6.0 * number("parameters") + 12.0 * 2.0 * 64.0 * 64.0;
    assert!(close(number("tflops"), flops * number("tokens_per_s") / 1e12));
    assert!(close(number("of_matmul_ceiling"), number("tflops") / number("matmul_ceiling_tflops")));
    let busy = &report["busy_ms"];
    assert!(busy["compute"].as_f64().unwrap() > 0.0, "{busy}");
    assert!(busy["compute"].as_f64().unwrap() <= number("observed_step_ms"), "{busy}");
    assert!(number("loss_last") < number("loss_first"), "the same tokens are learnt");
}

#[test]
fn missing_gpu_is_input_error() {
    let message = Sandbox::new().input_error("bench gpu --model llama-tiny --steps 2 --warmup 0");
    let what = if cfg!(feature = "cuda") { "NVIDIA driver" } else { "--features cuda" };
    assert!(message.contains("device \"cuda\"") && message.contains(what), "{message}");
    assert!(!message.contains("run.device"), "there is no run file: {message}");
}
