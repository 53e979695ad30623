//! Plugins that are none, or of no use: all end with exit code 2 and say which file it is and what to change.

use std::path::Path;
use std::process::Command;

use super::Sandbox;

/// Makes a shared library of C in the folder of a test.
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

/// A plugin that has four devices and compiles nothing.
fn fake(sandbox: &Sandbox, functions: usize, code: usize, message: &str) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/devices/fake_plugin.c");
    let defines = [
        format!("-DFUNCTIONS={functions}"),
        format!("-DCODE={code}"),
        format!("-DMESSAGE=\"{message}\""),
        "-DDEVICES=4".to_owned(),
    ];
    library(sandbox, "fake.so", &source, &defines.each_ref().map(String::as_str));
}

/// What a command says that ends with exit code 2.
fn told(sandbox: &Sandbox, command: &str) -> String {
    let ran = sandbox.fsdp(command);
    assert_eq!(ran.code, Some(2), "fsdp {command}: {}{}", ran.stdout, ran.stderr);
    ran.stderr
}

const COMPILE: &str = "compile run.toml --plugin ./fake.so --topology";
const TRAIN: &str = "train run.toml --set run.device=xla --set run.xla.plugin=./fake.so --set run.ranks";

#[test]
fn a_library_that_is_no_plugin() {
    let sandbox = Sandbox::new();
    sandbox.write("none.c", "int unused;\n");
    library(&sandbox, "fake.so", Path::new("none.c"), &[]);
    for command in [format!("{COMPILE} cpu:4"), format!("{TRAIN}=2")] {
        let refused = told(&sandbox, &command);
        assert!(refused.contains("./fake.so is no PJRT plugin: it has no function GetPjrtApi"), "{refused}");
    }
}

#[test]
fn a_plugin_whose_api_is_too_old() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 80, 3, "unused");
    let refused = told(&sandbox, &format!("{COMPILE} fake:4"));
    let said = "--plugin: the plugin ./fake.so has version 0.7 of the PJRT API, without PJRT_TopologyDescription_Create: a newer \
                one is needed";
    assert!(refused.contains(said), "{refused}");
    fake(&sandbox, 5, 3, "unused");
    let refused = told(&sandbox, &format!("{TRAIN}=2"));
    assert!(refused.contains("has version 0.7 of the PJRT API, without PJRT_Client_Create"), "{refused}");
}

#[test]
fn a_topology_that_the_plugin_does_not_know() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unused");
    let refused = told(&sandbox, &format!("{COMPILE} v9:2x2"));
    let said = "error: --topology: the plugin ./fake.so has no topology \"v9:2x2\". Names that were tried: v4:2x2x1, ";
    assert!(refused.starts_with(said), "{refused}");
    assert!(refused.contains("The plugin says: there are no such chips"), "{refused}");
}

#[test]
fn a_compiler_that_does_not_take_the_program() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unregistered operation");
    let said = "./fake.so, which reads StableHLO 1.9.2 (tried: 1.13 to 1.24), does not take the program: unregistered operation";
    for command in [format!("{COMPILE} fake:4"), format!("{TRAIN}=2")] {
        let refused = told(&sandbox, &command);
        assert!(refused.contains(said), "{refused}");
    }
}

#[test]
fn a_step_that_does_not_fit() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 8, "26.01G of 15.75G");
    let refused = told(&sandbox, &format!("{COMPILE} fake:4"));
    assert!(refused.contains("the step does not fit into the memory of a fake"), "{refused}");
    assert!(refused.contains("XLA says: 26.01G of 15.75G"), "{refused}");
    let refused = told(&sandbox, &format!("{TRAIN}=2"));
    assert!(
        refused.contains("the program does not fit into the memory of a device: 26.01G of 15.75G"),
        "{refused}"
    );
}

#[test]
fn fewer_devices_than_ranks() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unused");
    let refused = told(&sandbox, &format!("{TRAIN}=8 --set train.global_batch_size=16"));
    let said =
        "8 ranks need as many devices, and the plugin ./fake.so has 4 (fake): set `run.ranks` to at most 4";
    assert!(refused.contains(said), "{refused}");
    let refused = told(&sandbox, &format!("{COMPILE} fake:4 --ranks 8"));
    assert!(refused.contains("--ranks: 8 ranks need as many devices, and fake:4 has 4 (fake)"), "{refused}");
}

#[test]
fn layers_become_loops_where_the_run_file_says_so() {
    let sandbox = Sandbox::new();
    fake(&sandbox, 100, 3, "unused");
    let few = told(&sandbox, &format!("{COMPILE} fake:4 --set run.xla.scan_layers=true"));
    assert!(
        few.contains("warning: no layers became loops (run.xla.scan_layers): there are too few"),
        "{few}"
    );
    sandbox.edit("model/config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 9");
    let loops = |scan: bool| {
        told(&sandbox, &format!("{COMPILE} fake:4 --dump program.mlir --set run.xla.scan_layers={scan}"));
        sandbox.read("program.mlir").matches("stablehlo.while(").count()
    };
    assert_eq!(loops(false), 0);
    assert!(loops(true) >= 2);
}
