//! Checks that shrinking keeps what affects correctness.

use fsdp_core::wrap;

use super::*;

const LLAMA_8B: &str = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192}"#;
const GPT2: &str = r#"{"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024}"#;

fn setup(model: &str, fsdp: &str, train: &str) -> RunSetup {
    let text = format!(
        "[model]\npath = \"model\"\ninit = \"pretrained\"\n[data]\ntrain = [\"README.md\"]\nseq_len = 1024\n\
         [train]\nsteps = 10\nmicro_batch_size = 2\nglobal_batch_size = 256\n{train}\n\
         [fsdp]\n{fsdp}\n[run]\nranks = 64\nout_dir = \"runs/x\"\n"
    );
    let loaded = Resolved::parse(&text, "test", &[]).unwrap();
    RunSetup { config: loaded.config, model: HfConfig::parse(model).unwrap() }
}

#[test]
fn llama_8b_shrinks_proportionally() {
    let large = setup(LLAMA_8B, "wrap = [\"LlamaDecoderLayer\"]", "");
    let small = shrink(&large, &[1, 2, 4]).unwrap();
    let llama = small.setup.model.summary();
    assert_eq!((llama.heads, llama.kv_heads), (8, 2));
    assert_eq!((llama.hidden, llama.inner), (32, 112));
    assert_eq!((llama.layers, llama.vocab), (3, 256));
    let config = &small.setup.config;
    assert_eq!((config.data.seq_len, config.train.micro_batch_size), (32, 1));
    assert_eq!((config.train.global_batch_size, config.run.ranks), (8, 1));
    assert_eq!(config.model.init, Init::Random);
    assert_eq!(config.fsdp, large.config.fsdp);
}

#[test]
fn shrunk_batch_fits_replicas_and_groups() {
    let fsdp = "mesh = { replicate = 4 }\nreshard_after_forward = 8";
    let small = shrink(&setup(LLAMA_8B, fsdp, ""), &[2, 4]).unwrap();
    assert_eq!((small.setup.config.run.ranks, small.setup.config.train.global_batch_size), (4, 8));
    assert_eq!(small.setup.config.fsdp.mesh.replicate, 2);
    assert_eq!(small.setup.config.fsdp.reshard_after_forward, Reshard::ToGroup(2));
}

#[test]
fn micro_batch_count_is_power_of_two_iff_it_was_before() {
    let micro_batches = |global: usize, worlds: &[usize]| {
        let mut large = setup(LLAMA_8B, "", "");
        large.config.run.ranks = 2;
        large.config.train.global_batch_size = global * large.config.train.micro_batch_size;
        shrink(&large, worlds).unwrap().setup.config.train.micro_batches_per_step()
    };
    // A world that does not divide V does not count.
    assert_eq!(micro_batches(256, &[1, 2, 3]), 4);
    assert_eq!(micro_batches(192, &[1, 2, 4]), 24);
    assert_eq!(micro_batches(192, &[1, 2, 3]), 12);
    assert_eq!(micro_batches(10, &[1, 2, 4]), 12);
}

#[test]
fn smaller_reshard_groups_are_noted() {
    let note = |fsdp: &str| shrink(&setup(LLAMA_8B, fsdp, ""), &[2]).unwrap().notes.remove(0);
    assert_eq!(note("reshard_after_forward = 8"), "resharding to groups of 8 to 2");
    assert_eq!(note("reshard_after_forward = 64"), "resharding to groups of 64, all shards, to true");
}

#[test]
fn gpt2_positions_shrink_to_sequence_length() {
    let small = shrink(&setup(GPT2, "", ""), &[2]).unwrap();
    let gpt2 = small.setup.model.summary();
    assert_eq!((gpt2.positions, gpt2.hidden, gpt2.inner, gpt2.heads), (32, 16, 64, 4));
}

#[test]
fn min_num_params_note_matches_wrapped_modules() {
    // Layers of an 8B model have 218 million parameters, their MLPs 176 million, the embedding 525 million.
    for min in [100_000_000usize, 200_000_000, 300_000_000, 20_000_000_000] {
        let fsdp = format!("min_num_params = {min}");
        let large = setup(LLAMA_8B, &fsdp, "");
        let small = shrink(&large, &[2]).unwrap();
        let WrapPolicy::MinParams(scaled) = small.setup.config.fsdp.wrap else {
            panic!("it is still a minimum")
        };
        let kinds = |setup: &RunSetup, min: usize| {
            let spec = setup.build().unwrap().description().spec.clone();
            let units = wrap::units(&spec, &WrapPolicy::MinParams(min)).unwrap();
            let mut classes: Vec<String> = units
                .iter()
                .filter_map(|unit| spec.modules.iter().find(|module| module.fqn == unit.name))
                .map(|module| module.class.clone())
                .collect();
            classes.sort();
            classes.dedup();
            classes
        };
        let same = small.notes.iter().any(|note| note.ends_with("which wraps the same modules"));
        assert_eq!(same, kinds(&large, min) == kinds(&small.setup, scaled), "{min}: {:?}", small.notes);
    }
}

#[test]
fn only_frozen_patterns_of_cut_layers_are_dropped() {
    let fsdp = "frozen = [\"layers\\\\.31\\\\.\", \"embed_tokens\", \"no_such_name\"]";
    let small = shrink(&setup(LLAMA_8B, fsdp, ""), &[2]).unwrap();
    assert_eq!(small.setup.config.fsdp.frozen, ["embed_tokens", "no_such_name"]);
    assert!(small.notes.iter().any(|note| note.starts_with("fsdp.frozen without")), "{:?}", small.notes);
}

#[test]
fn byte_vocabulary_covers_special_token_ids() {
    let mut large = setup(LLAMA_8B, "", "");
    large.config.data.pad = TokenRef::Id(299);
    assert_eq!(vocabulary(&large.config), Some(300));
    large.config.data.format = Format::TokensU32;
    assert_eq!(vocabulary(&large.config), None);
}
