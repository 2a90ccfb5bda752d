"""Push an exported model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path


def push(folder: Path, model_id: str, *, private: bool) -> str:
    """Upload an exported folder to a hub repository, and create the repository if it is missing.

    Returns:
        The URL of the commit.

    Raises:
        ValueError: the hub cannot be reached or refuses; the folder is unchanged.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(model_id, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload model")
        return commit.commit_url
    except Exception as error:  # from the hub, HTTP or the file system: the remedy is the same
        raise ValueError(
            f"train.hub_model_id={model_id}: {' '.join(str(error).split())}; the export is complete, try again with "
            f"`hf upload {model_id} {folder}`"
        ) from error
