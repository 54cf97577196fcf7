"""Settings of the Serve application, and what its ingress opens."""

import pytest
from ray.serve import Application

from ragcachekit.cluster import AppSettings, build_app
from speaking import byte_level


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level().save_pretrained(folder)
    return str(folder)


def test_config_files_give_a_dictionary():
    assert isinstance(build_app({"model": "x", "replicas": "3", "gpus": "0.5"}), Application)
    assert isinstance(build_app(AppSettings(model="x")), Application)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({}, "model"), ({"model": "x", "replica": 2}, "replica"), ({"model": "x", "replicas": 0}, "replicas")],
)
def test_wrong_settings_are_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        build_app(wrong)


def test_contexts_need_a_folder_or_a_single_replica():
    settings = (
        AppSettings(model="x"),
        AppSettings(model="x", replicas=1),
        AppSettings(model="x", contexts="y"),
    )
    assert [one.has_contexts for one in settings] == [False, True, True]


def test_missing_ray_says_what_to_install(monkeypatch):
    import sys

    import ragcachekit.cluster as cluster

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'ray\[data,serve\]'"):
        cluster.__getattr__("build_app")
    with pytest.raises(AttributeError, match="nothing"):
        cluster.__getattr__("nothing")
