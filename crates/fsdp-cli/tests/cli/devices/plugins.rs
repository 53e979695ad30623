//! Files that are not plugins, and unusable plugins: exit code 2, and a message that names the file and what to change.

use std::path::Path;
use std::process::Command;

use super::Sandbox;
use crate::support::Ran;

/// Compiles a C source to a shared library in the folder of a test.
pub(super) fn library(sandbox: &Sandbox, name: &str, source: &Path, defines: &[&str]) {
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command
        .current_dir(sandbox.path(""))
        .args(["-shared", "-fPIC", "-o", name])
        .args(defines)
        .arg(source)
        .arg("-ldl");
    let output = command.output().expect("a C compiler is there, because Rust links with it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Builds a plugin that has four devices and compiles nothing.
fn fake(sandbox: &Sandbox, functions: usize, code: usize, message: &str) {
    fake_with(sandbox, functions, code, message, &[]);
}

fn fake_with(sandbox: &Sandbox, functions: usize, code: usize, message: &str, more: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/devices/fake_plugin.c");
    let defines = [
        format!("-DFUNCTIONS={functions}"),
        format!("-DCODE={code}"),
        format!("-DMESSAGE=\"{message}\""),
        "-DDEVICES=4".to_owned(),
    ];
    let defines: Vec<&str> = defines.iter().map(String::as_str).chain(more.iter().copied()).collect();
    library(sandbox, "fake.so", &source, &defines);
}

/// Returns the stderr of a command that must end with exit code 2.
fn input_error(sandbox: &Sandbox, command: &str) -> String {
    let ran = sandbox.fsdp(command);
    assert_eq!(ran.code, Some(2), "fsdp {command}: {}{}", ran.stdout, ran.stderr);
    ran.stderr
}

const COMPILE: &str = "compile run.toml --plugin ./fake.so --topology";
const TRAIN: &str = "train run.toml --set run.device=xla --set run.xla.plugin=./fake.so --set run.ranks";

#[test]
fn library_without_get_pjrt_api_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.write("none.c", "int unused;\n");
    library(&sandbox, "fake.so", Path::new("none.c"), &[]);
    for command in [format!("{COMPILE} cpu:4"), format!("{TRAIN}=2")] {
        let message = input_error(&sandbox, &command);
        assert!(
            message.contains("./fake.so is not a PJRT plugin: it has no function GetPjrtApi"),
            "{message}"
        );
    }
}

#[test]
fn unsupported_pjrt_api_version_is_rejected() {
    let sandbox = Sandbox::new();
    for (version, remedy) in [([0, 49], "a newer"), ([1, 0], "an older")] {
        let [major, minor] = version;
        fake_with(&sandbox, 100, 3, "unused", &[&format!("-DMAJOR={major}"), &format!("-DMINOR={minor}")]);
        let expected = format!(
            "the plugin ./fake.so has version {major}.{minor} of the PJRT API, but 0.50 to 0.x are supported: use {remedy} plugin"
        );
        for command in [format!("{COMPILE} fake:4"), format!("{TRAIN}=2")] {
            let message = input_error(&sandbox, &command);
            assert!(message.contains(&expected), "{message}");
        }
    }
}

#[test]
fn plugin_missing_function_is_rejected() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 80, 3, "unused");
    let message = input_error(&sandbox, &format!("{COMPILE} fake:4"));
    let expected = "--plugin: the plugin ./fake.so has version 0.70 of the PJRT API, without PJRT_TopologyDescription_Create: use \
                another plugin, or a newer one";
    assert!(message.contains(expected), "{message}");
    fake(&sandbox, 5, 3, "unused");
    let message = input_error(&sandbox, &format!("{TRAIN}=2"));
    assert!(message.contains("has version 0.70 of the PJRT API, without PJRT_Client_Create"), "{message}");
}

#[test]
fn unknown_topology_is_rejected() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unused");
    let message = input_error(&sandbox, &format!("{COMPILE} v9:2x2"));
    let expected = "error: --topology: the plugin ./fake.so has no topology \"v9:2x2\"; ";
    assert!(message.starts_with(expected), "{message}");
    assert!(message.contains("it has none of the names that fsdp knows"), "{message}");
    assert!(message.contains("The plugin says: there are no such chips"), "{message}");
}

#[test]
fn unknown_topology_lists_known_ones() {
    let sandbox = Sandbox::new();
    fake_with(&sandbox, 100, 3, "unused", &["-DV6E"]);
    let message = input_error(&sandbox, &format!("{COMPILE} v9:2x2"));
    assert!(message.contains("other names that it has are v6e:2x2, also with more chips"), "{message}");
    let message = input_error(&sandbox, &format!("{COMPILE} v6e:2x2 --topology-option chips=many"));
    let expected = "error: --topology-option: the plugin ./fake.so does not accept these options of \"v6e:2x2\", which it has \
                without them. It says: there are no such chips";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn uninstalled_plugin_suggests_pip_install() {
    let sandbox = Sandbox::new();
    for (keyword, package) in [("cpu", "lammps-jax-pjrt-cpu"), ("tpu", "libtpu"), ("cuda", "jax-cuda12-pjrt")]
    {
        let mut command = sandbox.command();
        command.env("PATH", sandbox.path("bin")).env("HOME", sandbox.path("home"));
        command.args(format!("{TRAIN}=2 --set run.xla.plugin={keyword}").split_whitespace());
        let ran = Ran::of(command.output().unwrap());
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        let expected = format!("no Python package has a PJRT plugin for \"{keyword}\", below ");
        let remedy = format!(": `pip install {package}`, or name the plugin's shared library");
        assert!(ran.stderr.contains(&expected) && ran.stderr.contains(&remedy), "{}", ran.stderr);
        assert!(ran.stderr.contains(sandbox.path("home/.local").to_str().unwrap()), "{}", ran.stderr);
    }
}

#[test]
fn compiler_rejection_is_reported() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unregistered operation");
    let expected = "./fake.so, which reads StableHLO 1.9.2 (tried: 1.7 to 1.24), rejected the program: unregistered operation";
    for command in [format!("{COMPILE} fake:4"), format!("{TRAIN}=2")] {
        let message = input_error(&sandbox, &command);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn step_exceeding_device_memory_is_rejected() {
    let sandbox = Sandbox::new();
    // The compiler reports that the step does not fit. Nothing was uploaded before, so `NO_ROOM` makes no difference.
    for more in [&[][..], &["-DNO_ROOM"]] {
        fake_with(&sandbox, 100, 8, "26.01G of 15.75G", more);
        for command in [format!("{COMPILE} fake:4"), format!("{TRAIN}=2 --overwrite")] {
            let message = input_error(&sandbox, &command);
            let expected = "the step does not fit into the memory of a fake, 1.0 MiB; the ledger predicts ";
            assert!(message.contains(expected), "{message}");
            assert!(message.contains(". Try train.micro_batch_size = 1 ("), "{message}");
            assert!(message.contains(" by the ledger). XLA says: 26.01G of 15.75G"), "{message}");
        }
    }
}

#[test]
fn options_unsupported_on_xla_are_rejected() {
    let sandbox = Sandbox::new();
    let xla = "--set run.device=xla --set run.xla.plugin=./fake.so";
    fake(&sandbox, 100, 3, "unused");
    for (command, option) in [
        (format!("verify run.toml {xla} --order-seed 1"), "--order-seed"),
        (format!("train run.toml {xla} --trace trace.json"), "--trace"),
        ("calibrate --device xla --out costs.json".to_owned(), "--device"),
    ] {
        let message = input_error(&sandbox, &command);
        let expected = format!("error: {option}: run.device = \"xla\" runs a step as one program");
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn mixture_of_experts_on_xla_is_rejected() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unused");
    let experts = "\"model_type\": \"mixtral\", \"num_local_experts\": 4, \"num_experts_per_tok\": 2";
    sandbox.edit("model/config.json", "\"model_type\": \"llama\"", experts);
    sandbox.edit("model/config.json", "LlamaForCausalLM", "MixtralForCausalLM");
    sandbox.edit("run.toml", "LlamaDecoderLayer", "MixtralDecoderLayer");
    for command in [format!("{COMPILE} fake:4"), format!("{TRAIN}=2")] {
        let message = input_error(&sandbox, &command);
        let expected = "run.device: \"xla\" does not support mixtures of experts; choose another device";
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn fewer_devices_than_ranks_is_rejected() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unused");
    let message = input_error(&sandbox, &format!("{TRAIN}=8 --set train.global_batch_size=16"));
    let expected =
        "8 ranks need as many devices, but the plugin ./fake.so has 4 (fake): set `run.ranks` to at most 4";
    assert!(message.contains(expected), "{message}");
    let message = input_error(&sandbox, &format!("{COMPILE} fake:4 --ranks 8"));
    assert!(message.contains("--ranks: 8 ranks need as many devices, but fake:4 has 4 (fake)"), "{message}");
}

#[test]
fn scan_layers_compiles_layers_to_loops() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unused");
    let few = input_error(&sandbox, &format!("{COMPILE} fake:4 --set run.xla.scan_layers=true"));
    assert!(
        few.contains("warning: no layers became loops (run.xla.scan_layers): there are too few"),
        "{few}"
    );
    sandbox.edit("model/config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 9");
    let loops = |scan: bool| {
        input_error(
            &sandbox,
            &format!("{COMPILE} fake:4 --dump program.mlir --set run.xla.scan_layers={scan}"),
        );
        sandbox.read("program.mlir").matches("stablehlo.while(").count()
    };
    assert_eq!(loops(false), 0);
    assert!(loops(true) >= 2);
}

#[test]
fn doctor_finds_plugins() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unused");
    let is_found = |report: &serde_json::Value, part: &str| {
        let findings = report["findings"].as_array().unwrap();
        let found = findings.iter().find(|found| found["part"] == part);
        found.is_some_and(|found| found["version"] == "PJRT 0.70, StableHLO 1.9.2")
    };
    let doctor = |variable: (&str, std::ffi::OsString), args: &str| {
        let mut command = sandbox.command();
        command.env_remove("PJRT_PLUGIN_LIBRARY_PATH").env(variable.0, variable.1).args(args.split(' '));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let device = |report: &serde_json::Value| {
        let devices =
            report["devices"].as_array().unwrap_or_else(|| report["nodes"][0]["devices"].as_array().unwrap());
        let xla = devices.iter().find(|device| device["device"] == "xla").unwrap();
        (xla["usable"] == true, xla["with"].as_str().unwrap().to_owned())
    };
    // Named by an environment variable.
    let named = doctor(("PJRT_PLUGIN_LIBRARY_PATH", "./fake.so".into()), "doctor --json");
    assert!(is_found(&named, "PJRT plugin"), "{named}");
    let with = "4 devices of fake (fake) by ./fake.so, PJRT 0.70, StableHLO 1.9.2";
    assert_eq!(device(&named), (true, with.to_owned()));
    // Named by a run file.
    sandbox.edit("run.toml", "[run]\n", "[run]\nxla = { plugin = \"./fake.so\" }\n");
    let of_run = doctor(("UNUSED", "".into()), "doctor run.toml --json");
    assert_eq!(device(&of_run), (true, with.to_owned()));
    // Installed by a Python package; another package holds a broken plugin.
    for (package, library) in [("libtpu", "libtpu.so"), ("lammps_jax_pjrt_cpu", "pjrt_c_api_cpu_plugin.so")] {
        let folder = sandbox.path("python/lib/python3.11/site-packages").join(package);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::copy(sandbox.path("fake.so"), folder.join(library)).unwrap();
    }
    sandbox.write("python/lib/python3.11/site-packages/libtpu/libtpu.so", "");
    let paths = [sandbox.path("python/bin"), "/usr/bin".into()];
    let installed = doctor(("PATH", std::env::join_paths(paths).unwrap()), "doctor --json");
    assert!(is_found(&installed, "PJRT plugin \"cpu\""), "{installed}");
    let broken =
        installed["findings"].as_array().unwrap().iter().find(|found| found["part"] == "PJRT plugin \"tpu\"");
    assert_eq!(broken.unwrap()["status"], "unusable", "{installed}");
    let (is_usable, with) = device(&installed);
    assert!(!is_usable && with == "no plugin is named; run.xla.plugin may be \"cpu\"", "{with}");
}
