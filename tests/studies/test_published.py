"""Published numbers, as printed in the paper's Table 1."""

from ecinn.studies.published import face_errors


def test_face_errors_are_those_of_table_1() -> None:
    assert face_errors("celeba/Smiling") == (0.0742, 0.0662)
    assert face_errors("celeba/High_Cheekbones") == (0.1438, 0.1374)
    assert face_errors("celeba/Wearing_Lipstick") == (0.0487, 0.0570)
    assert face_errors("celeba/Heavy_Makeup") == (0.1268, 0.1084)
    assert face_errors("mnist") is None
