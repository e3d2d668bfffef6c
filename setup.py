"Packaging: everything comes from settings.ini; each `*_requirements` entry there is an extra."

import shlex
import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]


def requirements(text):
    'Split on spaces; a requirement with an environment marker is quoted: "name; marker".'
    return shlex.split(text)


def readme():
    "README.md with its pictures addressed where PyPI can find them."
    raw = f"https://raw.githubusercontent.com/{cfg['user']}/{cfg['repo']}/{cfg['branch']}"
    return (
        (here / "README.md")
        .read_text(encoding="utf-8")
        .replace("](nbs/index_files/", f"]({raw}/nbs/index_files/")
    )


class WithResults(build_py):
    """Builds the package with a copy of results/, which its notebooks read where there is no
    clone."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / cfg["lib_path"] / "data" / "results"
            for path in sorted((here / "results").rglob("*.json")):
                target = folder / path.relative_to(here / "results")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


extras = {
    key.removesuffix("_requirements"): requirements(value)
    for key, value in cfg.items()
    if key.endswith("_requirements")
}
setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme(),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    project_urls={
        "Documentation": cfg["doc_host"] + cfg["doc_baseurl"],
        "Changes": cfg["git_url"] + "/blob/main/CHANGELOG.md",
    },
    keywords=cfg["keywords"],
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Natural Language :: English",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
    packages=find_packages(include=[cfg["lib_path"], cfg["lib_path"] + ".*"]),
    package_data={cfg["lib_path"]: ["data/*", "configs/*.json"]},
    include_package_data=True,
    python_requires=">=" + cfg["min_python"],
    install_requires=requirements(cfg["requirements"]),
    extras_require=extras,
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "vllm.general_plugins": cfg["vllm_plugins"].split(),
        "nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"],
    },
    cmdclass={"build_py": WithResults},
    zip_safe=False,
)
