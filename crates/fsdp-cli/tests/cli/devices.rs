//! `run.device`: a device that this binary was not built for is refused with the way to build it; the others work.

#[cfg(feature = "xla")]
mod joining;
#[cfg(feature = "xla")]
mod plugins;

use crate::support::Sandbox;
use crate::world::TORCHRUN;

#[test]
fn device_without_its_feature_is_rejected() {
    let sandbox = Sandbox::new();
    let mut missing = Vec::new();
    if !cfg!(feature = "torch") {
        missing.push(("torch-cpu", "torch"));
    }
    if !cfg!(feature = "cuda") {
        missing.push(("cuda", "cuda"));
    }
    if !cfg!(feature = "xla") {
        missing.push(("xla", "xla"));
    }
    for (device, feature) in missing {
        for command in ["train", "verify"] {
            let message = sandbox.input_error(&format!("{command} run.toml --set run.device={device}"));
            assert!(message.starts_with(&format!("error: device \"{device}\": ")), "{message}");
            assert!(message.contains(&format!("--features {feature}")), "{message}");
            let words: Vec<&str> = message.split_whitespace().collect();
            assert!(words.join(" ").contains("install the Python package"), "{message}");
        }
        let message = sandbox.input_error(&format!("bench train --steps 4 --device {device}"));
        assert!(message.contains(&format!("without the feature `{feature}`")), "{message}");
    }
}

#[test]
fn nccl_transport_on_cpu_is_rejected() {
    let ran = Sandbox::new().fsdp("launch --nproc 2 -- train run.toml --set run.transport=nccl");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let expected = "\"nccl\" connects GPUs, one for each rank, but these ranks are on CPUs";
    assert!(ran.stderr.contains(expected), "{}", ran.stderr);
}

/// `schedule` does not need the device that the run file names.
#[test]
fn schedule_is_printed_for_any_device() {
    for device in ["cpu", "torch-cpu", "cuda", "xla"] {
        let ran = Sandbox::new().succeed(&format!("schedule run.toml --set run.device={device}"));
        assert!(ran.stdout.contains("predicted peak memory"), "{}", ran.stdout);
    }
}

/// Builds a fake driver in the folder of a test. It reports four GPUs, and does nothing with them.
fn four_gpus(sandbox: &Sandbox) {
    // Every function that is looked up before the first one is called.
    let looked_for = include_str!("../../../fsdp-cuda/src/ffi/driver_library.rs");
    let names = looked_for.split('"').filter(|name| name.starts_with("cu") && !name.contains(' '));
    let mut source = String::new();
    for name in names.collect::<std::collections::BTreeSet<_>>() {
        let result = match name {
            "cuDriverGetVersion" => "if (n) *n = 13000",
            "cuDeviceGetCount" => "if (n) *n = 4",
            _ => "",
        };
        source.push_str(&format!("int {name}(int *n) {{ {result}; return 0; }}\n"));
    }
    sandbox.write("driver.c", source);
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = std::process::Command::new(compiler);
    command.current_dir(sandbox.path("")).args(["-shared", "-fPIC", "-o", "libcuda.so", "driver.c"]);
    let output = command.output().expect("a C compiler is there, because Rust links with it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn sole_launched_process_on_node_gets_rank_per_gpu() {
    let sandbox = Sandbox::new();
    four_gpus(&sandbox);
    sandbox.edit("run.toml", "ranks = 2\n", "device = \"cuda\"\n");
    sandbox.edit("run.toml", "global_batch_size = 8", "global_batch_size = 16");
    let started = |variables: [&str; 4]| {
        let mut command = sandbox.command();
        command.args(["schedule", "run.toml"]).env("LD_LIBRARY_PATH", sandbox.path(""));
        for (name, value) in TORCHRUN.into_iter().zip(variables).filter(|(_, value)| !value.is_empty()) {
            command.env(name, value);
        }
        crate::support::Ran::of(command.output().unwrap())
    };
    for (variables, ranks) in [
        (["", "", "", ""], 1),
        (["0", "1", "0", "1"], 4),
        (["0", "2", "0", "1"], 8),
        (["0", "2", "0", "2"], 2),
    ] {
        let ran = started(variables);
        let expected = format!("mesh 1 x {ranks} ");
        assert!(ran.stdout.contains(&expected), "{variables:?}: {expected}: {} {}", ran.stdout, ran.stderr);
    }
}

#[cfg(feature = "torch")]
#[test]
fn torch_cpu_trains_verifies_and_benchmarks() {
    let sandbox = Sandbox::new();
    for dtype in ["f32", "bf16"] {
        let set = format!("--set run.device=torch-cpu --set fsdp.param_dtype={dtype}");
        sandbox.succeed(&format!("train run.toml --overwrite --set run.deterministic=true {set}"));
        let ran = sandbox.succeed(&format!("verify run.toml --world-sizes 1,2,4 {set}"));
        assert!(ran.stdout.contains("promised: derived bounds"), "{}", ran.stdout);
    }
    let sizes = "--hidden 32 --layers 1 --heads 2 --kv-heads 1 --ffn 32 --vocab 64 --seq 16 --steps 4";
    sandbox.succeed(&format!("bench train --device torch-cpu --param-dtype bf16 {sizes}"));
}

#[cfg(feature = "xla")]
mod xla {
    use super::Sandbox;

    #[test]
    fn missing_or_invalid_plugin_is_rejected() {
        let sandbox = Sandbox::new();
        let train = "train run.toml --set run.device=xla --set run.ranks=2";
        let message = sandbox.input_error(train);
        assert!(message.contains("no PJRT plugin is named: set `run.xla.plugin`"), "{message}");
        let message = sandbox.input_error(&format!("{train} --set run.xla.plugin=run.toml"));
        assert!(message.contains("cannot open the PJRT plugin ./run.toml: ./run.toml: "), "{message}");
        // The data has not been read yet.
        let message = sandbox.input_error(&format!("{train} --set data.train=[\"nowhere\"]"));
        assert!(message.contains("no PJRT plugin is named"), "{message}");
        let checked = sandbox.fsdp("check run.toml --set run.device=xla --set run.xla.plugin=run.toml");
        assert_eq!(checked.code, Some(2), "{}", checked.stdout);
        assert!(
            checked.stdout.contains(
                "error    device        device \"xla\" cannot be used: cannot open the PJRT plugin ./run.toml"
            ),
            "{}",
            checked.stdout
        );
        for (key, value) in
            [("train.optimizer.name", "adamw8bit"), ("train.optimizer.name", "muon"), ("fsdp.offload", "cpu")]
        {
            let message = sandbox.input_error(&format!("{train} --set {key}={value}"));
            assert!(message.contains(key), "{message}");
        }
    }

    pub(super) fn plugin() -> Option<String> {
        let plugin = std::env::var("FSDP_TEST_PJRT").ok();
        if plugin.is_none() {
            println!("skipped: this test needs a PJRT plugin for processors, named by FSDP_TEST_PJRT");
        }
        plugin
    }

    #[test]
    fn plugin_for_other_architecture_is_rejected() {
        let sandbox = Sandbox::new();
        let mut header = [0; 64];
        header[..6].copy_from_slice(b"\x7fELF\x02\x01");
        // SPARC V9 (`EM_SPARCV9`), on which these tests are never run.
        header[18] = 43;
        std::fs::write(sandbox.path("plugin.so"), header).unwrap();
        let compile = "compile run.toml --topology cpu:4";
        let message = sandbox.input_error(&format!("{compile} --plugin plugin.so"));
        assert!(message.contains("is for machine 43 of ELF"), "{message}");
        let message = sandbox.input_error(compile);
        assert!(message.contains("no PJRT plugin is named"), "{message}");
    }

    #[test]
    fn step_compiles_for_topology_without_starting_devices() {
        let Some(plugin) = plugin() else { return };
        let sandbox = Sandbox::new();
        let compile = |more: &str| format!("compile run.toml --plugin {plugin} {more}");
        let native = "--topology cpu:4 --set run.xla.reduction=native";
        let ran = sandbox.succeed(&compile(&format!("{native} --json --dump step.mlir")));
        let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!((&report["devices"], &report["ranks"]), (&4.into(), &4.into()));
        let gathers = &report["program"]["collectives"]["all-gather"];
        assert!(gathers.as_u64().unwrap() > 1, "{report}");
        assert_eq!(&report["optimized"]["collectives"]["all-gather"], gathers);
        let text = std::fs::read_to_string(sandbox.path("step.mlir")).unwrap();
        assert_eq!(text.matches("stablehlo.all_gather\"").count() as u64, gathers.as_u64().unwrap());
        assert!(!sandbox.path("out").exists(), "nothing is run");
        let ran = sandbox.succeed(&compile(native));
        assert!(ran.stdout.contains("XLA compiled the step"), "{}", ran.stdout);
        assert!(ran.stdout.contains("peak, predicted by the ledger"), "{}", ran.stdout);
        for (more, expected) in [
            ("--topology v9:2x2", "has no topology \"v9:2x2\""),
            ("--topology cpu:2 --ranks 4", "4 ranks need as many devices, but cpu:2 has 2"),
            ("--topology cpu:2 --topology-option x", "expected KEY=VALUE"),
            ("--topology cpu:2 --set train.optimizer.name=adamw8bit", "adamw8bit"),
        ] {
            // Line breaks depend on the length of the plugin's path.
            let message = sandbox.input_error(&compile(more)).replace('\n', " ");
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn adafactor_is_compiled_and_verified() {
        let Some(plugin) = plugin() else { return };
        let sandbox = Sandbox::new();
        let adafactor = "--set train.optimizer={name='adafactor',lr=0.01,relative_step=false,beta1=0.9}";
        let compile = format!("compile run.toml --plugin {plugin} --topology cpu:4 {adafactor} --json");
        let ran = sandbox.succeed(&compile);
        let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(&report["ranks"], &4);
        let xla = format!("--set run.device=xla --set run.xla.plugin={plugin}");
        let ran = sandbox.succeed(&format!("verify run.toml {xla} {adafactor} --world-sizes 1,2,4"));
        assert!(ran.stdout.contains("near the oracle"), "{}", ran.stdout);
    }

    /// The CPU plugin completes reads late; the time of a step must not be attributed to the previous one.
    #[test]
    fn step_times_are_not_attributed_to_other_steps() {
        let Some(plugin) = plugin() else { return };
        let sandbox = Sandbox::new();
        let xla = format!("--set run.device=xla --set run.xla.plugin={plugin} --set run.ranks=2");
        sandbox.succeed(&format!("train run.toml {xla} --set train.steps=8 --set checkpoint.every=3"));
        let steps: Vec<serde_json::Value> = sandbox
            .read("out/metrics.jsonl")
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let mut times: Vec<f64> = steps.iter().filter_map(|step| step["step_ms"].as_f64()).collect();
        assert_eq!(times.len(), 8);
        times.sort_by(f64::total_cmp);
        // All steps do the same work; a step whose time is attributed to another takes almost none.
        assert!(times[0] > times[4] / 20.0, "{times:?}");
        assert!(steps.iter().all(|step| step["wait_ms"].is_null()), "nothing waits on the host: {steps:?}");
    }

    #[test]
    fn run_resumes_on_another_device() {
        let Some(plugin) = plugin() else { return };
        let sandbox = Sandbox::new();
        let xla = format!("--set run.device=xla --set run.xla.plugin={plugin}");
        let train = "train run.toml --set checkpoint.every=1 --set run.ranks=2";
        sandbox.succeed(&format!("{train} {xla} --set train.steps=2"));
        sandbox.succeed(&format!("{train} --set train.steps=3 --resume"));
        sandbox.succeed(&format!("{train} {xla} --set train.steps=4 --resume"));
        // Both devices compute the same loss for the exported model, up to 64 roundings in single precision.
        let eval = "eval run.toml --model out/model --set data.eval=[\"data.txt\"] --set run.ranks=2 --json";
        let [expected, found] = [eval.to_owned(), format!("{eval} {xla}")].map(|command| {
            let report: serde_json::Value = serde_json::from_str(&sandbox.succeed(&command).stdout).unwrap();
            report["evaluations"][0]["loss"].as_f64().unwrap()
        });
        let apart = (found - expected).abs() / expected;
        assert!(apart <= 64.0 * f64::from(f32::EPSILON), "{found} for {expected}");
    }
}
