//! Output folders of other trainers: a verdict covers the whole folder, and no file is omitted silently.

use std::fs;

use serde_json::{Value, json};

use crate::support::{Sandbox, folded};

#[test]
fn verify_folder_lists_read_and_unread_files() {
    let sandbox = Sandbox::with_fixtures(&["trainer/single/checkpoint-10"]);
    insta::assert_snapshot!(
        "verify_trainer",
        sandbox.succeed("ckpt verify trainer/single/checkpoint-10").stdout
    );
    let report = sandbox.json("ckpt verify trainer/single/checkpoint-10");
    assert_eq!(report["also_read"], json!([]));
    let unread = report["not_read"].as_array().unwrap();
    assert_eq!(unread.len(), 2, "{unread:?}");
    assert_eq!(unread[0]["reason"], "it is not a file of tensors");
    // Damage counts even in a file that is not part of the checkpoint.
    sandbox.flip("trainer/single/checkpoint-10/training_args.bin", 200);
    let ran = sandbox.find_fault("ckpt verify trainer/single/checkpoint-10");
    assert!(ran.stdout.contains("training_args.bin"), "{}", ran.stdout);
}

#[test]
fn incomplete_accelerate_folder_is_not_sound() {
    let folder = "accelerate/fsdp2_sharded";
    let sandbox = Sandbox::with_fixtures(&[folder]);
    insta::assert_snapshot!("verify_accelerate", sandbox.succeed(&format!("ckpt verify {folder}")).stdout);
    // A file that the metadata does not list is reported, and is not part of the checkpoint.
    let model = sandbox.path(folder).join("pytorch_model_fsdp_0");
    fs::copy(model.join("__1_0.distcp"), model.join("__2_0.distcp")).unwrap();
    let report = sandbox.json(&format!("ckpt verify {folder}"));
    assert_eq!(report["not_read"][0]["reason"], "the metadata of the checkpoint does not list it");
    for name in ["pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/__0_0.distcp"] {
        let path = sandbox.path(folder).join(name);
        let kept = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let ran = sandbox.find_fault(&format!("ckpt verify {folder}"));
        assert!(ran.stdout.contains(name) && ran.stdout.contains("not sound"), "{}", ran.stdout);
        fs::write(&path, kept).unwrap();
    }
    fs::remove_dir_all(&model).unwrap();
    let ran = sandbox.find_fault(&format!("ckpt verify {folder}"));
    let text = folded(&ran.stdout).replace('\n', " ");
    assert!(
        text.contains("what trainers leave beside a model (optimizer_0, ") && text.contains("but no model"),
        "{text}"
    );
}

#[test]
fn checkpoint_without_tensors_is_not_sound() {
    let sandbox = Sandbox::with_fixtures(&["accelerate/ddp"]);
    fs::create_dir(sandbox.path("alone")).unwrap();
    fs::copy(sandbox.path("accelerate/ddp/scheduler.bin"), sandbox.path("alone/scheduler.bin")).unwrap();
    let ran = sandbox.find_fault("ckpt verify alone");
    assert!(ran.stdout.contains("no model"), "{}", ran.stdout);
    fs::rename(sandbox.path("alone/scheduler.bin"), sandbox.path("alone/state.pt")).unwrap();
    let ran = sandbox.find_fault("ckpt verify alone");
    assert!(ran.stdout.contains("no tensor was found in it"), "{}", ran.stdout);
    let ran = sandbox.find_fault("ckpt verify alone/state.pt");
    assert!(ran.stdout.contains("no tensor was found in it"), "{}", ran.stdout);
}

#[test]
fn convert_includes_trainer_optimizer_and_scheduler() {
    let sandbox = Sandbox::with_fixtures(&["trainer/single/checkpoint-10"]);
    let report = sandbox.json("ckpt convert trainer/single/checkpoint-10 dcp --to dcp --no-sync");
    let format = report["source_format"].as_str().unwrap();
    assert_eq!(format, "safetensors; beside it optimizer.pt, rng_state.pth, scheduler.pt, training_args.bin");
    let report = sandbox.json("ckpt inspect dcp --tensors");
    let names: Vec<&str> =
        report["tensors"].as_array().unwrap().iter().map(|tensor| tensor["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"optimizer.state.0.exp_avg"), "{names:?}");
    assert!(report["values"].get("scheduler.last_epoch").is_some(), "{}", report["values"]);
    sandbox.succeed("ckpt diff trainer/single/checkpoint-10 dcp");
}

#[test]
fn files_next_to_checkpoint_are_noted_by_verify_and_convert() {
    let sandbox = Sandbox::with_fixtures(&["accelerate/ddp", "torch_files/hsdp_safetensors", "opaque.pth"]);
    let folder = "accelerate/ddp";
    fs::rename(sandbox.path("torch_files/hsdp_safetensors"), sandbox.path(folder).join("older")).unwrap();
    fs::copy(sandbox.path("opaque.pth"), sandbox.path(folder).join("opaque.pth")).unwrap();
    let report = sandbox.json(&format!("ckpt verify {folder}"));
    let limits: Vec<&str> =
        report["cannot_show"].as_array().unwrap().iter().map(|limit| limit.as_str().unwrap()).collect();
    assert!(limits.len() == 2 && limits[0].contains("gone from the folder"), "{limits:?}");
    assert!(limits[1].contains("the last ranks"), "{limits:?}");
    let opaque = report["opaque"].as_object().unwrap();
    assert!(opaque.keys().any(|name| name.starts_with("opaque.pth: ")), "{report}");
    let ran = sandbox.succeed(&format!("ckpt verify {folder}"));
    assert!(ran.stdout.ends_with("as far as its format can show: see the notes\n"), "{}", ran.stdout);
    let ran = sandbox.find_fault(&format!("ckpt verify {folder} --strict"));
    assert!(ran.stdout.contains("opaque.pth: it holds objects of classes"), "{}", ran.stdout);
    let report = sandbox.json(&format!("ckpt convert {folder} out --to safetensors --no-sync"));
    assert_eq!(
        report["notes"].as_array().unwrap().last().unwrap(),
        "not converted: accelerate/ddp/older, accelerate/ddp/opaque.pth"
    );
}

#[test]
fn diff_matches_wrapped_state_dict_under_its_key() {
    let sandbox = Sandbox::with_fixtures(&["torch_files"]);
    let (wrapped, bare) = ("torch_files/pickles/under_model.pt", "torch_files/pickles/bare.pt");
    let ran = sandbox.succeed(&format!("ckpt diff {wrapped} {bare}"));
    assert!(
        ran.stdout.ends_with("no difference under `model.` of A: 3 tensors (3 equal bits)\n"),
        "{}",
        ran.stdout
    );
    let report = sandbox.json(&format!("ckpt diff {bare} {wrapped}"));
    assert_eq!(report["under"], json!({"side": "second", "key": "model"}));
    assert_eq!(sandbox.json(&format!("ckpt diff {bare} {bare}"))["under"], Value::Null);
    // With other entries next to the key, the files are not equal.
    let ran =
        sandbox.succeed(&format!("ckpt convert {wrapped} bare.pth --to torch --from-key model --no-sync"));
    assert!(ran.stdout.contains("3 tensors") || ran.stdout.contains("tensors       3"), "{}", ran.stdout);
    sandbox.succeed(&format!("ckpt diff bare.pth {bare}"));
    sandbox.succeed(&format!("ckpt diff {wrapped} {bare} --only model"));
    let ran = sandbox.fsdp(&format!("ckpt inspect {bare} --from-key model"));
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("no tensor is under the key `model`"), "{}", ran.stderr);
}

#[test]
fn verify_notes_limits_of_shards_without_full_shapes() {
    let folder = "torch_files/hsdp_safetensors";
    let sandbox = Sandbox::with_fixtures(&[folder]);
    let shard =
        |rank: usize| sandbox.path(folder).join(format!("shard-0000{rank}-model-00001-of-00001.safetensors"));
    let report = sandbox.json(&format!("ckpt verify {folder}"));
    assert!(report["cannot_show"][0].as_str().unwrap().contains("the last ranks"), "{report}");
    let ran = sandbox.succeed(&format!("ckpt verify {folder}"));
    assert!(
        ran.stdout.ends_with("\nsound, as far as its format can show: see the notes\n"),
        "{}",
        ran.stdout
    );
    let kept = fs::read(shard(2)).unwrap();
    fs::copy(shard(1), shard(2)).unwrap();
    let ran = sandbox.find_fault(&format!("ckpt verify {folder}"));
    assert!(ran.stdout.contains("the same piece of tensor"), "{}", ran.stdout);
    let ran = sandbox.fsdp(&format!("ckpt convert {folder} out --to safetensors"));
    assert_eq!(ran.code, Some(2), "{}", ran.stdout);
    fs::remove_file(shard(2)).unwrap();
    let ran = sandbox.find_fault(&format!("ckpt verify {folder}"));
    assert!(ran.stdout.contains("there is no file of rank 1, but there is one of rank 3"), "{}", ran.stdout);
    fs::write(shard(2), kept).unwrap();
    sandbox.succeed(&format!("ckpt verify {folder}"));
}
