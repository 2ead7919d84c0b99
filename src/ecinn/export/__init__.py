"""A model in other runtimes: f, f⁻¹ and the method as ONNX graphs."""
