//! Logits of a model directory, for scripts that compare them with others: `logits MODEL_DIR` reads a JSON list of tokens for
//! each text from standard input, and prints the logits behind every token, as JSON.

use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::Arc;

use fsdp_core::DType;
use fsdp_nn::hf::HfConfig;
use fsdp_nn::model::Session;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::generate::load;

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::args().nth(1).ok_or("usage: logits MODEL_DIR < TOKENS.json")?;
    let config = std::fs::read_to_string(Path::new(&dir).join("config.json"))?;
    let texts: Vec<Vec<u32>> = serde_json::from_reader(io::stdin())?;
    let memory = Arc::new(HostMemory::new(HostOptions::default())?);
    let model = HfConfig::parse(&config)?.build()?;
    let weights = load(&memory, Path::new(&dir), &model, DType::F32)?;
    let mut all = Vec::new();
    for tokens in texts {
        let mut session = Session::new(Arc::clone(&memory), model.clone(), &weights, tokens.len())?;
        let behind: Result<Vec<Vec<f64>>, _> = tokens.iter().map(|&token| session.extend(&[token])).collect();
        all.push(behind?);
    }
    serde_json::to_writer(io::stdout(), &all)?;
    Ok(())
}
