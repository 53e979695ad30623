//! What the command line accepts and how it is read.

use clap::CommandFactory;

use super::*;

fn parse(line: &str) -> Result<Command, String> {
    let words = std::iter::once("fsdp").chain(line.split_whitespace());
    Args::try_parse_from(words).map(|args| args.command).map_err(|error| error.to_string())
}

#[test]
fn clap_definition_is_valid() {
    Args::command().debug_assert();
}

#[test]
fn train_collects_overrides_in_order() {
    let Ok(Command::Train(args)) = parse("train a.toml --set x.y=1 --set x.z=b --overwrite") else {
        panic!("train is parsed")
    };
    assert_eq!(args.run.overrides, ["x.y=1", "x.z=b"]);
    assert!(args.overwrite && args.trace.is_none());
}

#[test]
fn verify_splits_world_sizes() {
    let Ok(Command::Verify(args)) = parse("verify a.toml --world-sizes 1,3,8 --order-seed 7") else {
        panic!("verify is parsed")
    };
    assert_eq!((args.world_sizes, args.order_seed, args.steps), (vec![1, 3, 8], Some(7), 3));
}

#[test]
fn verify_reads_meshes_by_the_names_of_their_axes() {
    let meshes = |text: &str| match Args::try_parse_from(["fsdp", "verify", "a.toml", "--meshes", text]) {
        Ok(Args { command: Command::Verify(args), .. }) => {
            Ok(args.meshes.iter().map(ToString::to_string).collect::<Vec<_>>())
        }
        other => Err(other.map(drop).unwrap_err().to_string()),
    };
    let expected = ["1 x 4 (replicate x shard)", "2 x 1 x 2 (replicate x shard x context)"];
    assert_eq!(meshes("shard=4; replicate=2, context=2").unwrap(), expected);
    for (wrong, why) in [
        ("shards=4", "there is no axis `shards`, but replicate, shard, context"),
        ("shard=2,shard=4", "the axis shard has two sizes"),
        ("shard=0", "expected an integer of at least 1"),
        ("4", "expected sizes of axes, as in shard=2,context=2"),
    ] {
        assert!(meshes(wrong).unwrap_err().contains(why), "{wrong}");
    }
    assert!(parse("verify a.toml --meshes shard=4 --world-sizes 4").is_err());
}

#[test]
fn zero_ranks_and_steps_are_rejected() {
    for line in ["verify a.toml --world-sizes 1,0", "bench train --ranks 0", "bench train --steps 0"] {
        let error = parse(line).unwrap_err();
        assert!(error.contains("expected an integer of at least 1"), "{error}");
    }
    assert!(parse("verify a.toml --steps 0").is_err());
}

#[test]
fn bench_train_defaults_match_comparison() {
    let Ok(Command::Bench(BenchCommand::Train(args))) = parse("bench train --ranks 4 --wrap A,B") else {
        panic!("bench train is parsed")
    };
    assert_eq!((args.hidden, args.layers, args.heads, args.kv_heads), (256, 4, 8, 2));
    assert_eq!((args.ffn, args.vocab, args.seq, args.global_batch), (1024, 4096, 256, 8));
    assert_eq!((args.micro_batch, args.wrap), (None, vec!["A".to_owned(), "B".to_owned()]));
}

#[test]
fn misspelled_option_suggests_correct_one() {
    let error = parse("verify a.toml --world-size 2").unwrap_err();
    assert!(error.contains("--world-sizes"), "{error}");
}
