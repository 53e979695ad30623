//! The program on the host, and without a GPU.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::{Command, Output};

fn bench(options: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fsdp-gpu-bench"))
        .args(["--model", "llama-tiny"])
        .args(options)
        .output()
        .unwrap()
}

#[test]
fn report_is_consistent() {
    let ran = bench(&["--device", "cpu", "--batch", "2", "--steps", "4", "--warmup", "1", "--json"]);
    assert!(ran.status.success(), "{ran:?}");
    let report: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
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
    let ran = bench(&["--steps", "2", "--warmup", "0"]);
    let message = String::from_utf8(ran.stderr).unwrap();
    let what = if cfg!(feature = "torch") { "NVIDIA driver" } else { "--features torch" };
    assert!(ran.status.code() == Some(2) && message.contains(what), "{message}");
}
