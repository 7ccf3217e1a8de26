# First boot of a machine: one container under systemd. Its secrets are read from the cloud's store and live in memory only; a stop
# drains it; a notice that the cloud takes the machine back stops it; TLS, where it serves, ends in a proxy beside it. No provider.

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
  description = "What runs: image by digest, arguments, settings (environment, no secret), arguments of a run before it, files of the secrets by the path at which it wants them, whether it needs the GPUs."
  type = object({
    image    = string
    args     = list(string)
    settings = optional(map(string), {})
    prepare  = optional(list(string), [])
    files    = optional(map(string), {})
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
    condition     = alltrue([for name in keys(var.container.settings) : can(regex("^[A-Za-z_][A-Za-z0-9_]*$", name))])
    error_message = "container.settings: names of letters, digits and _, or the container does not start."
  }
  validation {
    condition     = alltrue([for word in concat(var.container.args, var.container.prepare) : can(regex("^[A-Za-z0-9_./:=@-]+$", word))])
    error_message = "container.args, container.prepare: letters, digits and _./:=@- only; everything else is a setting."
  }
}

variable "secrets" {
  description = "Secrets to read at start: ARN (AWS), projects/P/secrets/S (Google), https://VAULT.vault.azure.net/secrets/S (Azure). Each holds a JSON object from name to text; NAMES_LIKE_THIS become environment, others files in /run/mico."
  type        = list(string)
  default     = []
}

variable "tls" {
  description = "Ports at which TLS ends, with the certificate chain and key of the secret file tls.pem: each leads to a port of the container."
  type        = map(object({ port = number, to = number, alpn = string }))
  default     = {}
}

variable "stop_s" {
  description = "Seconds a stop may take before it is forced; the clouds' shortest notice is 30."
  type        = number
  default     = 25
}

locals {
  run = join(" ", concat(
    ["/usr/bin/docker run --rm --name mico --network host --log-driver none"],
    ["--read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges"],
    ["--env-file /etc/mico/settings.env --env-file /run/mico/secrets.env"],
    ["--volume /run/mico:/run/mico:ro --volume /var/lib/mico:/var/lib/mico"],
    [for path, name in var.container.files : "--volume /run/mico/${name}:${path}:ro"],
    var.container.gpu ? ["--gpus all --ipc host --volume triton:/opt/triton"] : [], # starts as the image's kernels; more are added
    [var.container.image],
  ))
  vars = {
    run     = local.run
    args    = join(" ", var.container.args)
    prepare = join(" ", var.container.prepare)
    read    = join(" ", concat(["/usr/bin/python3 /opt/mico/machine.py secrets /run/mico", var.cloud], var.secrets))
    cloud   = var.cloud
    stop_s  = var.stop_s
    tls     = var.tls
  }
  tls_only = ["mico-tls.service", "mico-renew.service", "mico-renew.timer"]
  units    = [for unit in fileset("${path.module}/units", "*") : unit if length(var.tls) > 0 || !contains(local.tls_only, unit)]
  started  = [for unit in local.units : unit if unit != "mico-renew.service"]
  files = merge(
    {
      "/opt/mico/machine.py"   = file("${path.module}/machine.py")
      "/etc/mico/settings.env" = join("", [for name, value in var.container.settings : "${name}=${value}\n"])
    },
    length(var.tls) > 0 ? { "/etc/mico/tls.cfg" = templatefile("${path.module}/tls.cfg", local.vars) } : {},
    { for unit in local.units : "/etc/systemd/system/${unit}" => templatefile("${path.module}/units/${unit}", local.vars) },
  )
  first_boot = {
    packages    = concat(var.container.gpu ? [] : ["docker.io"], length(var.tls) > 0 ? ["haproxy"] : []) # GPU images bring their own Docker
    write_files = [for path, content in local.files : { path = path, permissions = "0644", content = content }]
    runcmd = concat(
      length(var.tls) > 0 ? [["systemctl", "disable", "--now", "haproxy.service"]] : [], # ours has its own configuration
      [["systemctl", "daemon-reload"], concat(["systemctl", "enable", "--now"], local.started)],
    )
  }
}

output "user_data" {
  description = "Cloud-init text for a pool's user_data."
  value       = "#cloud-config\n${yamlencode({ for key, value in local.first_boot : key => value if length(value) > 0 })}"
}
