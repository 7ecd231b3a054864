"""What a worker of ours refuses of TensorFlow's protocol."""

from __future__ import annotations

import pytest

from forebay.service.errors import Unimplemented
from forebay.service.proto import tf_service_pb2 as pb
from forebay.service.worker.element_face import ElementFace


def test_a_coordinated_read_is_refused_before_it_takes_anything() -> None:
    face = ElementFace(lambda _: None)
    request = pb.GetElementRequest(task_id=1, consumer_index=0, round_index=0)
    with pytest.raises(Unimplemented, match="consumer 0 asks for: leave consumer_index"):
        face.get_element(request)
