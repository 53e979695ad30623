//! `fsdp ckpt convert`: conversions between all formats lose nothing, and options do what they say.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::ckpt::FIXTURES;
use crate::support::Sandbox;

/// The dtype, shape and role of a tensor.
type Described = (String, Value, String);

/// All tensors by name.
fn tensors(sandbox: &Sandbox, path: &str) -> BTreeMap<String, Described> {
    let report = sandbox.json(&format!("ckpt inspect {path} --tensors"));
    let of = |tensor: &Value, key: &str| tensor[key].as_str().unwrap().to_owned();
    let described = |tensor| (of(tensor, "dtype"), tensor["shape"].clone(), of(tensor, "role"));
    let listed = report["tensors"].as_array().unwrap();
    listed.iter().map(|tensor| (of(tensor, "name"), described(tensor))).collect()
}

#[test]
fn all_fixtures_convert_losslessly_to_all_formats() {
    let sandbox = Sandbox::with_all_fixtures();
    for (number, fixture) in FIXTURES.into_iter().enumerate() {
        for (target, options) in [
            ("safetensors", "--only all"),
            ("dcp", "--world-size 3"),
            ("native", "--world-size 2"),
            ("torch", ""),
        ] {
            let out = format!("{target}-{number}");
            let convert = format!("ckpt convert fixtures/{fixture} {out} --to {target} {options} --no-sync");
            let report = sandbox.json(&convert);
            assert_eq!(report["left_out"], serde_json::json!({"model": 0, "optimizer": 0, "other": 0}));
            if report["tied"].as_array().unwrap().is_empty() {
                sandbox.succeed(&format!("ckpt diff fixtures/{fixture} {out}"));
            }
            // Flat names carry less information on roles than nested ones.
            if target != "safetensors" {
                assert_eq!(
                    tensors(&sandbox, &format!("fixtures/{fixture}")),
                    tensors(&sandbox, &out),
                    "{convert}"
                );
            }
            sandbox.succeed(&format!("ckpt verify {out}"));
        }
    }
}

#[test]
fn chained_conversions_preserve_all_tensors() {
    let sandbox = Sandbox::with_all_fixtures();
    for (from, to, options) in [
        ("fixtures/dcp_2rank", "a", "--to native --world-size 3"),
        ("a", "b", "--to dcp --world-size 2"),
        ("b", "c.pth", "--to torch"),
        ("c.pth", "d.safetensors", "--to safetensors --only all"),
    ] {
        sandbox.succeed(&format!("ckpt convert {from} {to} {options} --no-sync"));
    }
    for other in ["a", "b", "c.pth", "d.safetensors"] {
        sandbox.succeed(&format!("ckpt diff fixtures/dcp_2rank {other}"));
    }
    assert_eq!(tensors(&sandbox, "fixtures/dcp_2rank"), tensors(&sandbox, "c.pth"));
    // Values are kept if both formats can hold them.
    let values = |path: &str| sandbox.json(&format!("ckpt inspect {path}"))["values"].clone();
    assert_eq!(values("fixtures/dcp_2rank"), values("c.pth"));
}

#[test]
fn fixtures_of_all_formats_hold_equal_values() {
    let sandbox = Sandbox::with_all_fixtures();
    for other in ["dcp_2rank", "dcp_2rank_zstd", "dcp_hsdp_2x2", "full.safetensors"] {
        sandbox.succeed(&format!("ckpt diff fixtures/full.pth fixtures/{other}"));
    }
    let strip = "ckpt convert fixtures/full.pth model.safetensors --to safetensors --strip-prefix model.";
    sandbox.succeed(strip);
    sandbox.succeed("ckpt diff model.safetensors fixtures/hf_sharded --only model");
    sandbox.succeed("ckpt diff model.safetensors fixtures/model_only.pth");
}

#[test]
fn convert_options_control_names_dtypes_and_files() {
    let sandbox = Sandbox::with_all_fixtures();
    sandbox.write("config.json", r#"{"tie_word_embeddings": false}"#);
    let options = "--to safetensors --dtype f16 --strip-prefix model. --rename blocks\\.(\\d+)=layers.$1 \
                   --max-shard-size 0.7kB --config config.json --memory 64KiB";
    let report = sandbox.json(&format!("ckpt convert fixtures/dcp_2rank out {options}"));
    let names = sandbox.names("out");
    assert_eq!(names.len(), report["files"].as_u64().unwrap() as usize, "{names:?}");
    assert!(names.contains(&"config.json".to_owned()), "{names:?}");
    assert!(names.contains(&"model.safetensors.index.json".to_owned()), "{names:?}");
    assert_eq!(
        fs::read(sandbox.path("out/config.json")).unwrap(),
        fs::read(sandbox.path("config.json")).unwrap()
    );
    let tensors = tensors(&sandbox, "out");
    assert_eq!(tensors["layers.1.up.weight"].0, "F16");
    assert!(tensors.keys().all(|name| !name.starts_with("model.") && !name.starts_with("optim.")));
}

#[test]
fn convert_can_write_optimizer_only() {
    let sandbox = Sandbox::with_all_fixtures();
    sandbox.succeed("ckpt convert fixtures/dcp_2rank optim.pth --to torch --only optimizer");
    let tensors = tensors(&sandbox, "optim.pth");
    assert!(tensors.values().all(|(_, _, role)| role == "optimizer") && !tensors.is_empty());
    sandbox.succeed("ckpt diff fixtures/dcp_2rank optim.pth --only optimizer");
}

#[test]
fn run_checkpoint_converts_to_its_exported_model() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=1");
    let checkpoint = "out/checkpoints/step-00000003";
    let report = sandbox.json(&format!("ckpt inspect {checkpoint}"));
    assert_eq!((&report["run_state"]["step"], &report["world_size"]), (&Value::from("3"), &Value::from(2)));
    let text = sandbox.succeed(&format!("ckpt inspect {checkpoint}")).stdout;
    assert!(text.contains("\nstep          3\n") && text.lines().count() < 30, "{text}");
    sandbox.succeed(&format!("ckpt verify {checkpoint}"));
    sandbox.succeed(&format!("ckpt convert {checkpoint} hf --to safetensors --config model/config.json"));
    for model in ["out/model", "hf"] {
        sandbox.succeed(&format!("ckpt diff {checkpoint} {model} --only model"));
    }
    // And back to native, for another number of ranks.
    sandbox.succeed(&format!("ckpt convert {checkpoint} resharded --to native --world-size 3"));
    sandbox.succeed(&format!("ckpt diff {checkpoint} resharded"));
    let other = sandbox.find_fault("ckpt diff out/checkpoints/step-00000002 resharded").stdout;
    assert!(other.contains("values that differ: run_state"), "{other}");
}

#[test]
fn run_resumes_from_round_trip_converted_checkpoint() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=1");
    sandbox.succeed("ckpt convert out/checkpoints/step-00000002 dcp --to dcp");
    sandbox.succeed("ckpt convert dcp native --to native --world-size 4");
    sandbox.succeed("train run.toml --resume-from native --set run.ranks=4 --set run.out_dir=on");
    sandbox.succeed("ckpt diff out/model on/model");
}

#[test]
fn documented_convert_commands_succeed() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sandbox = Sandbox::new();
    std::os::unix::fs::symlink(repository.join("crates"), sandbox.path("crates")).unwrap();
    fs::create_dir(sandbox.path("target")).unwrap();
    let mut commands = 0;
    for page in ["README.md", "docs/converting.md"] {
        let text = fs::read_to_string(repository.join(page)).unwrap().replace("\\\n", "");
        for command in text.lines().filter_map(|line| line.strip_prefix("fsdp ckpt ")) {
            let (command, _) = command.split_once('#').unwrap_or((command, ""));
            sandbox.succeed(&format!("ckpt {command}"));
            commands += 1;
        }
    }
    assert!(commands >= 6, "{commands} commands were found");
}

/// All but the line of the time, which differs.
#[test]
fn readme_conversion_output_matches() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = fs::read_to_string(repository.join("README.md")).unwrap();
    let (_, rest) = readme.split_once("\nfsdp ckpt convert ").unwrap();
    let (command, rest) = rest.split_once('\n').unwrap();
    let shown = rest.split("```").nth(2).unwrap().strip_prefix("text\n").unwrap();
    let sandbox = Sandbox::new();
    std::os::unix::fs::symlink(repository.join("crates"), sandbox.path("crates")).unwrap();
    let ran = sandbox.succeed(&format!("ckpt convert {command}"));
    let printed = format!("{}{}", ran.stdout, ran.stderr);
    let timeless = |text: &str| -> Vec<String> {
        text.lines().filter(|line| !line.starts_with("time ")).map(str::to_owned).collect()
    };
    assert_eq!(timeless(shown), timeless(&printed));
}

/// The address space of the process is smaller than the tensor, so the conversion cannot hold it whole. (In a build
/// with libtorch the libraries alone are larger.)
#[cfg(not(feature = "torch"))]
#[test]
fn conversion_does_not_hold_entire_tensor_in_memory() {
    const BYTES: u64 = 512 << 20;
    let sandbox = Sandbox::new();
    let entry = format!("\"dtype\":\"F32\",\"shape\":[{}],\"data_offsets\":[0,{BYTES}]", BYTES / 4);
    let header = format!("{{\"w\":{{{entry}}}}}");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    sandbox.write("w.safetensors", &bytes);
    let file = fs::OpenOptions::new().write(true).open(sandbox.path("w.safetensors")).unwrap();
    file.set_len(bytes.len() as u64 + BYTES).unwrap();
    for (target, out) in [("dcp", "dcp"), ("torch", "w.pth")] {
        let convert =
            format!("\"$FSDP\" ckpt convert w.safetensors {out} --to {target} --no-sync --memory 64MiB");
        let ran = sandbox.shell(&format!("ulimit -v 409600; {convert}"));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert_eq!(tensors(&sandbox, out)["w"].1, serde_json::json!([BYTES / 4]));
    }
}

#[test]
fn megatron_checkpoints_convert_to_what_their_writer_held() {
    let sandbox = Sandbox::with_fixtures(&["megatron"]);
    let from = "megatron/reshardable/iter_0000001";
    sandbox.succeed(&format!("ckpt verify {from}"));
    let named = sandbox.succeed(&format!("ckpt convert {from} own --to dcp --no-sync"));
    assert!(named.stdout.contains("those of Megatron Core;"), "{}", named.stdout);
    sandbox.succeed(&format!("ckpt diff own {from}"));
    let config = "--config megatron/expected_reshardable.json --no-sync";
    sandbox.succeed(&format!("ckpt convert {from} weights.safetensors --to safetensors {config}"));
    let expected = "megatron/expected_reshardable.safetensors";
    let only = format!(
        "ckpt convert {expected} expected.safetensors --to safetensors --strip-prefix model. --no-sync"
    );
    sandbox.succeed(&only);
    sandbox.succeed("ckpt diff weights.safetensors expected.safetensors");
    // Moments have names of their parameters in every format, and weights a directory that transformers loads.
    sandbox.succeed(&format!("ckpt convert {from} native --to native {config}"));
    let state = tensors(&sandbox, "native");
    assert!(
        state.contains_key("optimizer.state.model.layers.1.self_attn.q_proj.weight.exp_avg_sq"),
        "{:?}",
        state.keys()
    );
    sandbox.succeed(&format!("ckpt convert {from} hf --to safetensors {config}"));
    assert!(sandbox.path("hf").join("config.json").exists());
}

#[test]
fn orbax_checkpoints_convert_to_what_their_writer_held() {
    let sandbox = Sandbox::with_fixtures(&["orbax"]);
    for kind in ["ocdbt_zarr2", "ocdbt_zarr3"] {
        sandbox.succeed(&format!("ckpt verify orbax/{kind}"));
        sandbox.succeed(&format!("ckpt convert orbax/{kind} {kind}.pth --to torch --only all --no-sync"));
        sandbox.succeed(&format!("ckpt diff {kind}.pth orbax/expected.safetensors"));
        sandbox.succeed(&format!("ckpt diff orbax/{kind} orbax/expected.safetensors"));
    }
    let refused = sandbox.fsdp("ckpt inspect orbax/uncommitted/2.orbax-checkpoint-tmp");
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("its save was not committed"), "{}", refused.stderr);
}
