"""An adapter of peft."""

import common
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict


def main():
    out = common.fresh("lora")
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(common.llama(), config)
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        if parameter.requires_grad:  # PEFT initializes the second matrix to zero
            parameter.data = torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(out / "adapter")
    (out / "adapter/README.md").unlink()
    common.expect(out / "expected.safetensors", get_peft_model_state_dict(model))


if __name__ == "__main__":
    main()
