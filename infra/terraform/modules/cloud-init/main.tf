# First boot of a machine: one container under systemd. Its secrets are read from the cloud's store at every start and live in memory
# only; a stop drains it; a notice that the cloud takes the machine back stops it. No provider.

terraform { required_version = ">= 1.11" }

variable "cloud" {
  description = "Whose metadata service and secret store the machine has: aws, gcp or azure."
  type        = string
  validation {
    condition     = contains(["aws", "gcp", "azure"], var.cloud)
    error_message = "cloud: aws, gcp or azure."
  }
}

variable "container" {
  description = "What runs: image by digest, arguments, settings (environment, no secret), whether it needs the GPUs."
  type = object({
    image    = string
    args     = list(string)
    settings = optional(map(string), {})
    gpu      = optional(bool, false)
  })
  validation {
    condition     = can(regex("@sha256:[0-9a-f]{64}$", var.container.image))
    error_message = "container.image: pin it by digest, name@sha256:…, so that every machine runs the same."
  }
  validation {
    condition     = alltrue([for value in values(var.container.settings) : !strcontains(value, "\n")])
    error_message = "container.settings: one line each."
  }
  validation {
    condition     = alltrue([for word in var.container.args : can(regex("^[A-Za-z0-9_./:=@-]+$", word))])
    error_message = "container.args: letters, digits and _./:=@- only; everything else is a setting."
  }
}

variable "secrets" {
  description = "Secrets to read at start: ARN (AWS), projects/P/secrets/S (Google), https://VAULT.vault.azure.net/secrets/S (Azure). Each holds a JSON object from name to text; NAMES_LIKE_THIS become environment, others files in /run/mico."
  type        = list(string)
  default     = []
}

variable "stop_s" {
  description = "Seconds a stop may take before it is forced; the clouds' shortest notice is 30."
  type        = number
  default     = 25
}

locals {
  docker = concat(
    ["/usr/bin/docker", "run", "--rm", "--name", "mico", "--network", "host", "--log-driver", "none"],
    ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"],
    ["--env-file", "/etc/mico/settings.env", "--env-file", "/run/mico/secrets.env"],
    ["--volume", "/run/mico:/run/mico:ro", "--volume", "/var/lib/mico:/var/lib/mico"],
    var.container.gpu ? ["--gpus", "all", "--ipc", "host"] : [],
    [var.container.image], var.container.args,
  )
  files = {
    "/opt/mico/machine.py"   = file("${path.module}/machine.py")
    "/etc/mico/settings.env" = join("", [for name, value in var.container.settings : "${name}=${value}\n"])
    "/etc/systemd/system/mico.service" = templatefile("${path.module}/mico.service", {
      secrets = join(" ", concat([var.cloud], var.secrets))
      run     = join(" ", local.docker)
      stop_s  = var.stop_s
    })
    "/etc/systemd/system/mico-notice.service" = templatefile("${path.module}/mico-notice.service", { cloud = var.cloud })
  }
}

output "user_data" {
  description = "Cloud-init text for a pool's user_data."
  value = join("\n", ["#cloud-config", yamlencode({
    packages       = var.container.gpu ? [] : ["docker.io"] # images with GPU drivers bring their own
    package_update = !var.container.gpu
    write_files    = [for path, content in local.files : { path = path, permissions = "0644", content = content }]
    runcmd         = [["systemctl", "daemon-reload"], ["systemctl", "enable", "--now", "mico.service", "mico-notice.service"]]
  })])
}
