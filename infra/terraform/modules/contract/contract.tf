# The interface of every pool module, linked into each of them so that it cannot drift. The other half is `output "pool"`: its
# keys are the same in every pool, which each module's test asserts.

variable "pool" {
  description = "A group of identical machines: the gateways of one region, or the engines of one site."
  type = object({
    name          = string       # unique in the federation, such as aws-eu-central
    role          = string       # gateway or engine
    region        = string       # in the cloud's own spelling
    machine_types = list(string) # in order of preference
    gpu           = optional(object({ type = string, count = number }))
    min           = number # machines at first, and never fewer
    max           = number # machines that a scaler may ask for
    spot          = optional(bool, false)
    disk_gb       = optional(number, 100)
  })

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,22}[a-z0-9]$", var.pool.name))
    error_message = "pool.name: 3 to 24 characters of a-z, 0-9 and -, starting with a letter and not ending with -."
  }
  validation {
    condition     = contains(["gateway", "engine"], var.pool.role)
    error_message = "pool.role: gateway or engine."
  }
  validation {
    condition     = var.pool.min >= 0 && var.pool.max >= max(1, var.pool.min)
    error_message = "pool: 0 <= min <= max, and max is at least 1."
  }
  validation {
    condition     = alltrue([for number in [var.pool.min, var.pool.max, var.pool.disk_gb] : floor(number) == number])
    error_message = "pool: min, max and disk_gb are whole numbers."
  }
  validation {
    condition     = var.pool.disk_gb >= 30
    error_message = "pool.disk_gb: at least 30, or the machine's image does not fit."
  }
  validation {
    condition     = length(var.pool.machine_types) > 0
    error_message = "pool.machine_types: name at least one."
  }
  validation {
    condition     = var.pool.role == "engine" || (!var.pool.spot && var.pool.gpu == null)
    error_message = "pool: a gateway runs on demand and without a GPU."
  }
}

variable "user_data" {
  description = "First boot of a machine, from module cloud-init. It can be read by anyone who may describe the machine, so it holds no secret."
  type        = string
}

variable "ports" {
  description = "TCP ports that a gateway serves, by name; the balancer passes each through unchanged. An engine dials out and serves none."
  type        = map(number)
  default     = {}

  validation {
    condition     = (var.pool.role == "gateway") == contains(keys(var.ports), "api")
    error_message = "ports: a gateway serves at least `api`, whose /health the balancer asks; an engine serves nothing."
  }
}

variable "ingress_cidrs" {
  description = "Addresses that may reach a gateway's ports. An engine pool has no inbound rule at all."
  type        = list(string)
  default     = []

  validation {
    condition     = var.pool.role == "gateway" || length(var.ingress_cidrs) == 0
    error_message = "ingress_cidrs: an engine has no inbound rule; leave it empty."
  }
}

variable "cidr" {
  description = "Private range of the pool's own network, /22 or larger. Engine pools are never routed to each other, so theirs may repeat."
  type        = string
  default     = "10.20.0.0/20"
}

variable "secrets" {
  description = "Secrets that the machines may read at boot: ARNs (AWS), secret ids (Google), resource ids (Azure)."
  type        = list(string)
  default     = []
}

variable "tags" {
  description = "Tags or labels of every resource that can carry them, in lower case."
  type        = map(string)
  default     = {}
}
