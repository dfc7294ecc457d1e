"""TEMPORARY"""
import json
from pathlib import Path
G = {
 "llama-3-8b": dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=128256, rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu", tie_word_embeddings=False, bos_token_id=128000, eos_token_id=128001),
 "qwen3-0.6b": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1000000.0, hidden_act="silu", tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645),
}
def write_model(folder, name, *, max_context):
    (Path(folder)/"config.json").write_text(json.dumps(G[name] | {"max_position_embeddings": max_context}))
