//! Logits of a model directory, for scripts that compare them with others: `logits MODEL_DIR` reads a JSON list of tokens for
//! each text from standard input, and prints the logits after every token, as JSON. `logits --tokens TOKENIZER` reads a JSON
//! list of texts, and prints the tokens of each.

use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::Arc;

use fsdp_core::DType;
use fsdp_data::Tokenizer;
use fsdp_nn::hf::HfConfig;
use fsdp_nn::model::Session;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::generate::load;

fn main() -> Result<(), Box<dyn Error>> {
    const USAGE: &str = "usage: logits MODEL_DIR < TOKENS.json, or logits --tokens TOKENIZER < TEXTS.json";
    let dir = std::env::args().nth(1).ok_or(USAGE)?;
    if dir == "--tokens" {
        return print_tokens(&std::env::args().nth(2).ok_or(USAGE)?);
    }
    let config = std::fs::read_to_string(Path::new(&dir).join("config.json"))?;
    let texts: Vec<Vec<u32>> = serde_json::from_reader(io::stdin())?;
    let memory = Arc::new(HostMemory::new(HostOptions::default())?);
    let model = HfConfig::parse(&config)?.build()?;
    let weights = load(&memory, Path::new(&dir), &model, DType::F32)?;
    let mut all = Vec::new();
    for tokens in texts {
        let mut session = Session::new(Arc::clone(&memory), model.clone(), &weights, tokens.len())?;
        let after: Result<Vec<Vec<f64>>, _> = tokens.iter().map(|&token| session.extend(&[token])).collect();
        all.push(after?);
    }
    serde_json::to_writer(io::stdout(), &all)?;
    Ok(())
}

fn print_tokens(tokenizer: &str) -> Result<(), Box<dyn Error>> {
    let texts: Vec<String> = serde_json::from_reader(io::stdin())?;
    let tokenizer = Tokenizer::load(tokenizer)?;
    let tokens = texts.iter().map(|text| tokenizer.encode(text)).collect::<Result<Vec<_>, _>>();
    serde_json::to_writer(io::stdout(), &tokens.map_err(|fault| fault.to_string())?)?;
    Ok(())
}
