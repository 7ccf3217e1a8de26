# One L4 (24 GB) a machine, spot, from none to four machines. A 7-8 billion parameter model in bfloat16 fits.
site = {
  name          = "gcp-europe-west"
  region        = "europe-west4"
  machine_types = ["g2-standard-8", "g2-standard-12"]
  gpu           = { type = "nvidia-l4", count = 1 }
  min           = 0
  max           = 4
  spot          = true
  disk_gb       = 200
}

model = "Qwen/Qwen2.5-7B-Instruct"

settings = {
  MICO_SITE_SLOTS        = "64"
  MICO_SITE_USD_PER_HOUR = "0.50" # of one machine: put in what you pay
}
