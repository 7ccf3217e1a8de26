"""Read and set the sizes of the clouds' machine groups. One small class per cloud."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import httpx

TIMEOUT_S = 20.0
GCP_TOKEN_URL = "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token"
AZURE_TOKEN_URL = "http://169.254.169.254/metadata/identity/oauth2/token"
AZURE_API = "2024-07-01"


class GroupFailed(Exception):
    """The cloud refused a request or did not answer. The message is the cloud's."""


class Group(Protocol):
    """A resizable group of machines. Methods raise GroupFailed."""

    async def size(self) -> int: ...
    async def resize(self, machines: int) -> None: ...


class AwsGroup:
    """An Auto Scaling group. boto3 finds the credentials, usually the machine's role."""

    def __init__(self, group: str, region: str) -> None:
        import boto3  # the extra `aws`

        self._group = group
        self._client = boto3.client("autoscaling", region_name=region)

    async def size(self) -> int:
        found = await self._call("describe_auto_scaling_groups", AutoScalingGroupNames=[self._group])
        if not found["AutoScalingGroups"]:
            raise GroupFailed(f"there is no Auto Scaling group {self._group!r} here")
        return int(found["AutoScalingGroups"][0]["DesiredCapacity"])

    async def resize(self, machines: int) -> None:
        await self._call(
            "set_desired_capacity",
            AutoScalingGroupName=self._group,
            DesiredCapacity=machines,
            HonorCooldown=False,
        )

    async def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return dict(await asyncio.to_thread(getattr(self._client, name), **arguments))
        except (BotoCoreError, ClientError) as exc:
            raise GroupFailed(str(exc)) from exc


class GcpGroup:
    """A regional managed instance group, with the machine's service account as credentials."""

    def __init__(self, project: str, region: str, group: str, http: httpx.AsyncClient) -> None:
        self._url = (
            f"https://compute.googleapis.com/compute/v1/projects/{project}/regions/{region}"
            f"/instanceGroupManagers/{group}"
        )
        self._http = http

    async def size(self) -> int:
        return int((await self._call("GET", self._url))["targetSize"])

    async def resize(self, machines: int) -> None:
        await self._call("POST", f"{self._url}/resize?size={machines}")

    async def _call(self, method: str, url: str) -> dict[str, Any]:
        token = await _request(self._http, "GET", GCP_TOKEN_URL, headers={"Metadata-Flavor": "Google"})
        return await _request(self._http, method, url, headers=_bearer(token))


class AzureGroup:
    """A virtual machine scale set, with the machine's managed identity as credentials."""

    def __init__(self, subscription: str, resource_group: str, group: str, http: httpx.AsyncClient) -> None:
        self._url = (
            f"https://management.azure.com/subscriptions/{subscription}/resourceGroups/{resource_group}"
            f"/providers/Microsoft.Compute/virtualMachineScaleSets/{group}?api-version={AZURE_API}"
        )
        self._http = http

    async def size(self) -> int:
        return int((await self._call("GET"))["sku"]["capacity"])

    async def resize(self, machines: int) -> None:
        await self._call("PATCH", {"sku": {"capacity": machines}})

    async def _call(self, method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        query = {"api-version": "2018-02-01", "resource": "https://management.azure.com/"}
        token = await _request(self._http, "GET", AZURE_TOKEN_URL, headers={"Metadata": "true"}, params=query)
        return await _request(self._http, method, self._url, headers=_bearer(token), json=body)


def _bearer(token: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {token['access_token']}"}


async def _request(http: httpx.AsyncClient, method: str, url: str, **options: Any) -> dict[str, Any]:
    try:
        answer = await http.request(method, url, timeout=TIMEOUT_S, **options)
        if answer.is_error:
            raise GroupFailed(f"{method} {url}: {answer.status_code} {answer.text[:300]}")
        return dict(answer.json()) if answer.content else {}
    except (httpx.HTTPError, ValueError) as exc:
        raise GroupFailed(f"{method} {url}: {exc}") from exc
